"""Decode steps as CUDA graphs: one launch replays the whole forward.

A graph is recorded for a number of sequences with one token each; a step of fewer is padded with rows
that have no stored tokens and write nowhere. All its inputs lie in buffers that never move: one copy
brings a step's numbers, and the kernels find their work from lengths on the device.

While nothing but the likeliest tokens is asked for, the next step is known before its tokens are: the
same sequences, one place further. It is launched at once, its tokens read where the step before left
them on the device, so the device does not wait while the host deals with results. If the next step
turns out to be another one, what was launched is forgotten: it wrote behind the ends of its sequences,
where whoever comes next writes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.attention.base import Step
from kvant.engine.batch import Batch
from kvant.engine.sampler import Greedy

Forward = Callable[[Tensor, Step, Tensor], Tensor]
"""input_ids [T], step, logits_index [n] -> logits [n, vocab_size]."""


def batch_sizes(most: int) -> list[int]:
    """Numbers of sequences that get a graph: close enough that padding costs little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 2048, 32)]
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded forward and where its results are. best, tokens: [size], of every row of logits."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    best: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A step on the host, by row. numbers: of the sequences. table: [rows, pages]."""

    numbers: list[int]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    table: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that runs or has run. best, tokens: its results, pinned, there once `done` is."""

    numbers: _Numbers
    graph: _Graph
    best: Tensor
    tokens: Tensor
    done: torch.cuda.Event


class _Staging:
    """Pinned memory for one step's numbers and results. Rows: ids, positions, slots, lengths, sources."""

    def __init__(self, most: int, max_pages: int) -> None:
        self.numbers = torch.zeros(5, most, dtype=torch.int64).pin_memory()
        self.table = torch.zeros(most * max_pages, dtype=torch.int32).pin_memory()
        self.best = torch.zeros(most, dtype=torch.float32).pin_memory()
        self.tokens = torch.zeros(most, dtype=torch.int64).pin_memory()
        self.free = torch.cuda.Event()  # type: ignore[no-untyped-call]


class DecodeGraphs:
    """Graphs for up to `most` sequences whose page table has `max_pages` columns."""

    def __init__(
        self, forward: Forward, most: int, max_pages: int, max_model_len: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._most = most
        self._max_model_len = max_model_len
        self._device = device
        self._inputs = torch.zeros(5, most, dtype=torch.int64, device=device)
        self._inputs[2] = -1
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self._table = torch.zeros(most, max_pages, dtype=torch.int32, device=device)
        # Three, as two steps can be on their way while the numbers of a third are written.
        self._staging = [_Staging(most, max_pages) for _ in range(3)]
        self._turn = 0
        self._offsets = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, dtype=torch.int64, device=device)
        self._graphs: dict[int, _Graph] = {}
        self._sizes = batch_sizes(most)
        self._expected: _Launched | None = None
        self._current: tuple[_Launched, list[int] | None] | None = None

    def capture(self) -> None:
        """Record every graph. Nothing is written to the pool: every row is padding meanwhile."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for size in reversed(self._sizes):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run(size)  # kernels are compiled and libraries set up outside of the graph
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._run(size)
                best, tokens = logits.max(dim=-1)
            self._graphs[size] = _Graph(graph, logits, best, tokens)
        torch.cuda.synchronize(self._device)

    def holds(self, step: Step) -> bool:
        """Whether there is a graph for such a step."""
        return step.max_seqlen_q == 1 and step.seqlens_kv.shape[0] <= self._most and step.causal

    def forget(self) -> None:
        """Another step comes between: what was launched for the next one is not what it will be."""
        self._expected = self._current = None

    def run(self, batch: Batch, numbers: list[int]) -> Tensor:
        """Logits [num_seqs, vocab_size] of a step on the host, valid until the next run.

        numbers: of the sequences. If the batch says what comes ahead, no logits are returned (their
        width is 0), only `greedy` tells the tokens: the next step is already taking their place.
        """
        step = batch.step
        now = _Numbers(
            numbers,
            step.positions.numpy(),
            step.slot_mapping.numpy(),
            step.page_table.numpy(),
        )
        launched, self._expected = self._expected, None
        rows = None
        if launched is not None:
            rows = _rows_in(launched.numbers, now)
            launched = None if rows is None else launched
        if launched is None:
            launched = self._launch(now, ids=batch.input_ids.numpy())
        self._current = (launched, rows)
        count = len(numbers)
        if batch.ahead is None:
            logits = launched.graph.logits
            return logits[:count] if rows is None else logits[torch.tensor(rows)]
        ahead = _Numbers(numbers, batch.ahead.positions, batch.ahead.slots, batch.ahead.table)
        self._expected = self._launch(
            ahead,
            after=launched.graph.tokens,
            sources=np.arange(count) if rows is None else np.array(rows),
        )
        return launched.graph.logits[:count, :0]

    def greedy(self) -> Greedy:
        """Of the rows of the last run. Waits for it, not for what was launched behind it."""
        assert self._current is not None
        launched, rows = self._current
        launched.done.synchronize()
        count = len(launched.numbers.numbers)
        sound = torch.isfinite(launched.best[:count]).tolist()
        tokens = launched.tokens[:count].tolist()
        if rows is None:
            return sound, tokens
        return [sound[row] for row in rows], [tokens[row] for row in rows]

    def _launch(
        self,
        step: _Numbers,
        *,
        ids: NDArray[np.int64] | None = None,
        after: Tensor | None = None,
        sources: NDArray[np.int64] | None = None,
    ) -> _Launched:
        """Replay a graph. ids: the tokens; or `after`, tokens on the device, and each row's place there."""
        count = len(step.numbers)
        size = next(size for size in self._sizes if size >= count)
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]
        staging.free.synchronize()
        host = staging.numbers.numpy()
        host[:, :size] = 0
        host[2, :size] = -1
        if ids is not None:
            host[0, :count] = ids
        else:
            host[4, :count] = sources
        host[1, :count] = step.positions
        host[2, :count] = step.slots
        host[3, :count] = np.where(step.slots < 0, 0, step.positions + 1)
        pages = step.table.shape[1]
        table = staging.table[: count * pages].view(count, pages)
        table.numpy()[:] = step.table
        self._inputs.copy_(staging.numbers, non_blocking=True)
        self._lengths.copy_(self._inputs[3])
        self._table[:count, :pages].copy_(table, non_blocking=True)
        if after is None:
            self._ids.copy_(self._inputs[0])
        else:
            torch.index_select(after, 0, self._inputs[4, :size], out=self._ids[:size])
        graph = self._graphs[size]
        graph.graph.replay()
        staging.best[:count].copy_(graph.best[:count], non_blocking=True)
        staging.tokens[:count].copy_(graph.tokens[:count], non_blocking=True)
        staging.free.record()
        return _Launched(step, graph, staging.best, staging.tokens, staging.free)

    def _run(self, size: int) -> Tensor:
        step = Step(
            cu_seqlens_q=self._offsets[: size + 1],
            seqlens_kv=self._lengths[:size],
            page_table=self._table[:size],
            slot_mapping=self._inputs[2, :size],
            positions=self._inputs[1, :size],
            max_seqlen_q=1,
            max_seqlen_kv=self._max_model_len,
        )
        return self._forward(self._ids[:size], step, self._rows[:size])


def _rows_in(launched: _Numbers, now: _Numbers) -> list[int] | None:
    """Where a step's sequences stand in one that was launched; None if it was another one."""
    places = {number: row for row, number in enumerate(launched.numbers)}
    rows = [places.get(number, -1) for number in now.numbers]
    if -1 in rows:
        return None
    same = np.array_equal(launched.slots[rows], now.slots)
    return rows if same and np.array_equal(launched.positions[rows], now.positions) else None
