"""Share of time in steady steps in which nothing runs on the GPU, from torch's profiler.

It records only what runs on the device, not Python. Some steps run first whose records are
discarded: a CUDA graph launches slowly when the profiler sees it for the
first time, and the first records of a session may be lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, supported_activities

LONG_GAP_US = 10.0
"""Minimum length of a long gap: kernels of one CUDA graph should follow each other sooner."""
WARM_UP_STEPS = 3
_LEAST_SEEN = 0.5


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle time over `steps` consecutive steps. The time runs from the begin of the first to the end of
    the last piece of work on the device: kernels, copies and fills of all streams.

    share: of the time in which nothing ran. long_share: the same for gaps of LONG_GAP_US or more.
    busy_ms: per step, with work running. wall_ms: per step, on the host's clock, until the device
    was done, including the profiler's cost. num_pieces: pieces of work in all steps.
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
    """There is no figure; the message says why."""

    why: str


def find_gaps(intervals: Iterable[tuple[float, float]]) -> list[float]:
    """Returns the lengths of gaps between the first begin and the last end of (begin, end), in order
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
    """Runs `WARM_UP_STEPS` and then `steps` steps of the device, the latter under the profiler.

    Later work in this process may be slower, because the profiler stays loaded.
    """
    found = recorded(device, step, steps)
    if isinstance(found, NotProfiled):
        return found
    events, wall_ms = found
    return idle_of(list(work_of(events)), steps, wall_ms)


def recorded(
    device: torch.device, step: Callable[[], object], steps: int
) -> tuple[Sequence[Any], float] | NotProfiled:
    """Runs steps as `measure_idle` does; returns the profiler's events of the last `steps`, and the
    milliseconds that those took on the host's clock.
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
    return profiler.events(), wall_ms  # type: ignore[no-untyped-call]


def work_of(events: Iterable[Any]) -> Iterator[tuple[float, float]]:
    """Returns begin and end of work on the device, in microseconds, from a profiler's events.

    Calls of the host are left out, and so are names given to ranges of a stream's time.
    """
    for event in events:
        if event.device_type != DeviceType.CPU and not event.is_user_annotation:
            yield event.time_range.start, event.time_range.end


def idle_of(work: list[tuple[float, float]], steps: int, wall_ms: float) -> Idle | NotProfiled:
    """Computes idle time. work: (begin, end) in microseconds, of all steps, which took wall_ms together."""
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
