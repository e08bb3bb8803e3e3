"""Times on the GPU's own clock: replays of CUDA graphs, and launches."""

from __future__ import annotations

from collections.abc import Callable

import torch


def elapsed_us(run: Callable[[], object]) -> float:
    """Returns microseconds from begin to end of what `run` launches on the current stream; waits for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def captured(run: Callable[[], object], inner: int) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of `inner` runs, captured after a warm-up and replayed once."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    return elapsed_us(graph.replay)


def time_us(run: Callable[[], object], *, repeats: int = 20, inner: int = 4) -> list[float]:
    """Microseconds of each repetition: replays of a captured graph of `inner` runs, after a warm-up."""
    graph = captured(run, inner)
    return [replay_us(graph) / inner for _ in range(repeats)]
