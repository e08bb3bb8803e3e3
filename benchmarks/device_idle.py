"""How much of the time of steady steps nothing runs on the GPU, seen by torch's profiler.

Only what runs on the device is recorded, not what Python does. Some steps go first while records are
already taken and thrown away: a recorded step is slow to launch when the profiler sees it for the
first time, and the first records of a session may be lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, supported_activities

LONG_GAP_US = 10.0
"""Gaps from here on are told apart: kernels of one recorded step should follow each other sooner."""
WARM_UP_STEPS = 3
_LEAST_SEEN = 0.5


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle time over `steps` consecutive steps. The time runs from the begin of the first to the end of
    the last piece of work on the device: kernels, copies and fills of all streams.

    share: of the time, when nothing ran. long_share: the same in gaps of LONG_GAP_US or more.
    busy_ms: of a step, when something ran. wall_ms: of a step, on the host's clock, until the device
    was done; with what the profiler costs. num_pieces: of work, in all steps.
    """

    steps: int
    share: float
    long_share: float
    longest_gap_us: float
    busy_ms: float
    wall_ms: float
    num_pieces: int


@dataclass(frozen=True, slots=True)
class NotProfiled:
    """No figure, and why."""

    why: str


def find_gaps(intervals: Iterable[tuple[float, float]]) -> list[float]:
    """Lengths of what lies uncovered between the first begin and the last end of (begin, end), in order
    of time. Intervals may overlap and come in any order.
    """
    gaps: list[float] = []
    covered: float | None = None
    for begin, end in sorted(intervals):
        if covered is not None and begin > covered:
            gaps.append(begin - covered)
        covered = end if covered is None else max(covered, end)
    return gaps


def measure_idle(
    device: torch.device, step: Callable[[], object], steps: int
) -> Idle | NotProfiled:
    """Run `WARM_UP_STEPS` and then `steps` steps of the device, the latter under the profiler.

    What runs later in this process may be slower for it: the profiler stays loaded.
    """
    if device.type == "cpu":
        return NotProfiled("steps run on the CPU")
    if ProfilerActivity.CUDA not in supported_activities():  # type: ignore[no-untyped-call]
        return NotProfiled("this build of torch cannot profile a GPU")
    profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    profiler.prepare_trace()
    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize()
    profiler.start_trace()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    wall_ms = 1000 * (time.perf_counter() - begin)
    profiler.stop_trace()
    events = profiler.events()  # type: ignore[no-untyped-call]
    return idle_of(list(work_of(events)), steps, wall_ms)


def work_of(events: Iterable[Any]) -> Iterator[tuple[float, float]]:
    """Begin and end of what ran on the device, in microseconds, of a profiler's events.

    The host's calls are left out, and so are names that were given to a stretch of a stream's time.
    """
    for event in events:
        if event.device_type != DeviceType.CPU and not event.is_user_annotation:
            yield event.time_range.start, event.time_range.end


def idle_of(work: list[tuple[float, float]], steps: int, wall_ms: float) -> Idle | NotProfiled:
    """work: (begin, end) in microseconds, of all steps, which took wall_ms together."""
    if not work:
        return NotProfiled(
            "torch's profiler saw nothing run on the GPU: CUPTI is missing, not allowed, or in use"
        )
    span_us = max(end for _, end in work) - min(begin for begin, _ in work)
    if span_us < 1000 * _LEAST_SEEN * wall_ms:
        return NotProfiled(
            f"torch's profiler saw only {span_us / 1000:.1f} ms of {wall_ms:.1f} on the GPU"
        )
    gaps = find_gaps(work)
    idle_us = sum(gaps)
    return Idle(
        steps=steps,
        share=idle_us / span_us,
        long_share=sum(gap for gap in gaps if gap >= LONG_GAP_US) / span_us,
        longest_gap_us=max(gaps, default=0.0),
        busy_ms=(span_us - idle_us) / 1000 / steps,
        wall_ms=wall_ms / steps,
        num_pieces=len(work),
    )
