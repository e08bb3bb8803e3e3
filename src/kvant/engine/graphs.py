"""Decode steps as CUDA graphs: one launch replays the whole forward.

A graph is recorded for a number of sequences with one token each; a step of fewer is padded with rows
that have no stored tokens and write nowhere. All its inputs lie in buffers that never move: one copy
brings a step's numbers, and the kernels find their work from lengths on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvant.attention.base import Step

Forward = Callable[[Tensor, Step, Tensor], Tensor]
"""input_ids [T], step, logits_index [n] -> logits [n, vocab_size]."""


def batch_sizes(most: int) -> list[int]:
    """Numbers of sequences that get a graph: close enough that padding costs little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 2048, 32)]
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    """Graphs for up to `most` sequences whose page table has `max_pages` columns."""

    def __init__(
        self, forward: Forward, most: int, max_pages: int, max_model_len: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._most = most
        self._max_model_len = max_model_len
        self._device = device
        # Rows: ids, positions, slots, lengths.
        self._numbers = torch.zeros(4, most, dtype=torch.int64, device=device)
        self._numbers[2] = -1
        self._lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self._table = torch.zeros(most, max_pages, dtype=torch.int32, device=device)
        self._host = torch.zeros(4, most, dtype=torch.int64).pin_memory()
        self._host_table = torch.zeros(most * max_pages, dtype=torch.int32).pin_memory()
        self._offsets = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._sizes = batch_sizes(most)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Record every graph. Nothing is written to the pool: every row is padding meanwhile."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for done, size in enumerate(reversed(self._sizes)):
            if progress is not None:
                progress(done, len(self._sizes))
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run(size)  # kernels are compiled and libraries set up outside of the graph
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._run(size)
            self._graphs[size] = (graph, logits)
        torch.cuda.synchronize(self._device)

    def holds(self, step: Step) -> bool:
        """Whether there is a graph for such a step."""
        return step.max_seqlen_q == 1 and step.seqlens_kv.shape[0] <= self._most and step.causal

    def run(self, input_ids: Tensor, step: Step) -> Tensor:
        """Logits [num_seqs, vocab_size] of a step on the host; valid until the next run."""
        count = input_ids.shape[0]
        size = next(size for size in self._sizes if size >= count)
        host = self._host
        self._copied.synchronize()  # the last step's numbers have left the pinned memory
        host[:, :size] = 0
        host[2, :size] = -1
        host[0, :count] = input_ids
        host[1, :count] = step.positions
        host[2, :count] = step.slot_mapping
        host[3, :count] = step.seqlens_kv
        pages = step.page_table.shape[1]
        table = self._host_table[: count * pages].view(count, pages)
        table.copy_(step.page_table)
        self._numbers.copy_(host, non_blocking=True)
        self._lengths.copy_(self._numbers[3])
        self._table[:count, :pages].copy_(table, non_blocking=True)
        self._copied.record()
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]

    def _run(self, size: int) -> Tensor:
        step = Step(
            cu_seqlens_q=self._offsets[: size + 1],
            seqlens_kv=self._lengths[:size],
            page_table=self._table[:size],
            slot_mapping=self._numbers[2, :size],
            positions=self._numbers[1, :size],
            max_seqlen_q=1,
            max_seqlen_kv=self._max_model_len,
        )
        return self._forward(self._numbers[0, :size], step, self._rows[:size])
