"""The share of time in which a device idles: counted from what ran, and never made up."""

from __future__ import annotations

import time

import pytest
import torch
from benchmarks import device_idle
from benchmarks.device_idle import (
    LONG_GAP_US,
    WARM_UP_STEPS,
    Idle,
    NotProfiled,
    find_gaps,
    idle_of,
    measure_idle,
    work_of,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

_PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=20)


@given(_PIECES)
def test_gaps_are_the_runs_of_moments_in_which_nothing_runs(
    pieces: list[tuple[int, int]],
) -> None:
    runs = {moment for begin, length in pieces for moment in range(begin, begin + length)}
    line = "".join(
        "x" if m in runs else "." for m in range(min(runs, default=0), max(runs, default=0))
    )
    expected = [len(gap) for gap in line.split("x") if gap]
    assert find_gaps((begin, begin + length) for begin, length in pieces) == expected


def test_the_time_counts_from_the_first_begin_to_the_last_end() -> None:
    # 100 to 200 with a gap of 20 and one of 5; one piece lies within another, one overlaps.
    work = [(170.0, 180.0), (100.0, 150.0), (110.0, 120.0), (175.0, 185.0), (190.0, 200.0)]
    found = idle_of(work, 2, wall_ms=0.15)
    assert isinstance(found, Idle)
    assert found.share == pytest.approx(0.25)
    assert found.long_share == pytest.approx(0.20)
    assert found.longest_gap_us == 20.0 >= LONG_GAP_US
    assert found.busy_ms == pytest.approx(0.075 / 2)
    assert found.wall_ms == pytest.approx(0.075)
    assert (found.steps, found.num_pieces) == (2, 5)


def test_a_profiler_that_saw_nothing_or_half_gives_no_figure() -> None:
    assert isinstance(idle_of([], 3, 10.0), NotProfiled)
    assert isinstance(idle_of([(0.0, 4000.0)], 3, 10.0), NotProfiled)
    assert isinstance(idle_of([(0.0, 9000.0)], 3, 10.0), Idle)


def _event(name: str, begin: float, end: float, **more: object) -> FunctionEvent:
    return FunctionEvent(1, name, 0, begin, end, **more)


def test_only_what_ran_on_the_device_is_work() -> None:
    events = [
        _event("cudaGraphLaunch", 0.0, 50.0, device_type=DeviceType.CPU),
        _event("Memcpy HtoD (Pinned -> Device)", 1.0, 2.0, device_type=DeviceType.CUDA),
        _event("a region", 1.0, 40.0, device_type=DeviceType.CUDA, is_user_annotation=True),
        _event("kernel", 5.0, 9.0, device_type=DeviceType.CUDA),
    ]
    assert list(work_of(events)) == [(1.0, 2.0), (5.0, 9.0)]


class _Recorded:
    """A profiler of a device on which every step runs 2 ms. happened: in order."""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def prepare_trace(self) -> None:
        self.happened.append("prepare")

    def start_trace(self) -> None:
        self.happened.append("start")

    def stop_trace(self) -> None:
        self.happened.append("stop")

    def events(self) -> list[FunctionEvent]:
        seen = self.happened[self.happened.index("start") :].count("step")
        return [
            _event("kernel", 2100.0 * n, 2100.0 * n + 2000.0, device_type=DeviceType.CUDA)
            for n in range(seen)
        ]


def test_only_steps_behind_the_warm_up_are_seen_and_all_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(device_idle, "supported_activities", lambda: {ProfilerActivity.CUDA})
    monkeypatch.setattr(device_idle, "profile", lambda activities, acc_events: _Recorded(happened))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))

    def step() -> None:
        happened.append("step")
        time.sleep(0.002)

    found = measure_idle(torch.device("cuda"), step, 4)
    warm = ["prepare", *["step"] * WARM_UP_STEPS, "wait"]
    assert happened == [*warm, "start", *["step"] * 4, "wait", "stop"]
    assert isinstance(found, Idle)
    assert found.num_pieces == found.steps == 4
    assert found.share == pytest.approx(300 / (4 * 2100 - 100))
    assert found.wall_ms >= 2.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_runs_and_it_is_said() -> None:
    def step() -> None:
        raise AssertionError("nothing is to be profiled")

    for name in ("cpu", "cuda"):
        assert isinstance(measure_idle(torch.device(name), step, 4), NotProfiled)


@pytest.mark.gpu
def test_a_device_that_waits_for_the_host_idles_and_one_that_does_not_does_not() -> None:
    cycles = 2_000_000  # about a millisecond
    graph = torch.cuda.CUDAGraph()
    torch.cuda._sleep(cycles)
    with torch.cuda.graph(graph):
        torch.cuda._sleep(cycles)
        torch.cuda._sleep(cycles)

    def waits() -> None:
        graph.replay()
        torch.cuda.synchronize()
        time.sleep(0.004)

    for step, least, most in (
        (graph.replay, 0.0, 0.1),
        (waits, 0.3, 0.95),
        (graph.replay, 0.0, 0.1),
    ):
        found = measure_idle(torch.device("cuda"), step, 10)
        assert isinstance(found, Idle), found
        assert found.num_pieces == 20
        assert least <= found.share <= most
        assert 0.5 < found.busy_ms < found.wall_ms < 20
