"""Steps with pieces of prompts as recorded graphs, where Python would take longer to launch them than the
device to run them.

A graph is recorded for so many tokens and sequences; a step of fewer is padded with tokens that belong
to no sequence and are written nowhere, and with sequences that have no tokens. All numbers of a step go
to the device in one copy, its page table in another.

Every query goes through the backend's kernel for pages here: a step's cut (which sequence is long, from
where to where) is the host's knowledge, and a graph has none of it. So long contexts are not for graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvant.attention.base import Step
from kvant.execution.batch import Batch
from kvant.execution.graphs import Forward
from kvant.execution.recorder import Recorder
from kvant.execution.shared_logits import SharedLogits
from kvant.plan.graph_sizes import piece_sizes

MOST_CONTEXT = 8192
"""Stored tokens of a sequence: longer ones are multiplied faster as they lie in `Step.long`."""

MOST_READ = 1 << 17
"""Stored tokens of all sequences, for the same reason."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Views of one piece of int64 memory, behind each other: what a step of a size is made of.

    ids, positions, slots: [tokens]. ends: [seqs + 1], offsets of queries, with the 0 before. lengths:
    [seqs]. wanted: [seqs], places in the tokens.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    ends: Tensor
    lengths: Tensor
    wanted: Tensor

    @classmethod
    def of(cls, memory: Tensor, tokens: int, seqs: int) -> _Numbers:
        sizes = _sizes(tokens, seqs)
        return cls(*torch.split(memory[: sum(sizes)], sizes))


def _sizes(tokens: int, seqs: int) -> list[int]:
    return [tokens, tokens, tokens, seqs + 1, seqs, seqs]


class _Staging:
    """Memory of the host for one step's numbers."""

    def __init__(self, recorder: Recorder, room: int, most_table: int) -> None:
        self.memory = recorder.host_buffer(room, dtype=torch.int64)
        self.table = recorder.host_buffer(most_table, dtype=torch.int32)
        self.copied = recorder.mark()


class BatchGraphs:
    """Graphs for steps of up to `most_seqs` sequences and some of the `most_tokens` a step may have."""

    def __init__(
        self,
        forward: Forward,
        most_seqs: int,
        most_tokens: int,
        *,
        page_size: int,
        max_model_len: int,
        device: torch.device,
        recorder: Recorder,
        logits: SharedLogits,
    ) -> None:
        self._forward = forward
        self._recorder = recorder
        self._max_context = min(max_model_len, MOST_CONTEXT)
        self._sizes = piece_sizes(most_seqs, most_tokens)
        most_pages = -(-self._max_context // page_size)
        tokens, seqs = (max(side) for side in zip(*self._sizes, strict=True))
        room = sum(_sizes(tokens, seqs))
        self._memory = torch.zeros(room, dtype=torch.int64, device=device)
        self._table = torch.zeros(seqs, most_pages, dtype=torch.int32, device=device)
        # Two: the device may not have read the numbers of a step that nobody waited for.
        self._staging = [_Staging(recorder, room, seqs * most_pages) for _ in range(2)]
        self._turn = 0
        self._graphs: dict[tuple[int, int], tuple[Callable[[], None], Tensor]] = {}
        self._logits = logits

    def capture(self) -> None:
        """Record every graph. Nothing is written to the pool: every token is padding meanwhile."""
        for tokens, seqs in reversed(self._sizes):
            _Numbers.of(self._memory, tokens, seqs).slots.fill_(-1)
            run = partial(self._run, tokens, seqs)
            replay, (logits,) = self._recorder.record(run)
            self._graphs[tokens, seqs] = replay, logits
            self._memory.zero_()

    def run(self, batch: Batch, newest: Tensor | None = None) -> Tensor | None:
        """Logits [len(batch.logits_index), vocab_size], valid until the next step; None if no graph
        holds this step. newest: the batch's first ids, on the device.
        """
        size = self._size_for(batch)
        if size is None:
            return None
        staging = self._staging[self._turn]
        self._turn = 1 - self._turn
        staging.copied.synchronize()
        self._write(staging, batch, *size)
        staging.copied.record()
        if newest is not None:
            self._memory[: len(newest)].copy_(newest)
        replay, logits = self._graphs[size]
        replay()
        return logits[: batch.logits_index.shape[0]]

    def _size_for(self, batch: Batch) -> tuple[int, int] | None:
        step = batch.step
        if step.max_seqlen_kv > self._max_context or int(step.seqlens_kv.sum()) > MOST_READ:
            return None
        tokens, rows = batch.input_ids.shape[0], batch.logits_index.shape[0]
        needed = max(rows, step.seqlens_kv.shape[0])
        fitting = ((t, n) for t, n in self._sizes if t >= tokens and n >= needed)
        return next(fitting, None)

    def _write(self, staging: _Staging, batch: Batch, tokens: int, seqs: int) -> None:
        """The step's numbers to the device, those of padding behind them."""
        step = batch.step
        host = _Numbers.of(staging.memory, tokens, seqs)
        num_tokens, num_seqs = batch.input_ids.shape[0], step.seqlens_kv.shape[0]
        for target, source, padding in (
            (host.ids, batch.input_ids, 0),
            (host.positions, step.positions, 0),
            (host.slots, step.slot_mapping, -1),
            (host.ends, step.cu_seqlens_q, num_tokens),
            (host.lengths, step.seqlens_kv, 0),
            (host.wanted, batch.logits_index, 0),
        ):
            count = source.shape[0]
            target[:count] = source
            target[count:] = padding
        room = sum(_sizes(tokens, seqs))
        self._memory[:room].copy_(staging.memory[:room], non_blocking=True)
        pages = step.page_table.shape[1]
        table = staging.table[: num_seqs * pages].view(num_seqs, pages)
        table.copy_(step.page_table)
        self._table[:num_seqs, :pages].copy_(table, non_blocking=True)

    def _run(self, tokens: int, seqs: int) -> tuple[Tensor]:
        """What is recorded: the model over what lies in the graph's memory. Logits."""
        numbers = _Numbers.of(self._memory, tokens, seqs)
        step = Step(
            cu_seqlens_q=numbers.ends.to(torch.int32),
            seqlens_kv=numbers.lengths.to(torch.int32),
            page_table=self._table[:seqs],
            slot_mapping=numbers.slots,
            positions=numbers.positions,
            max_seqlen_q=tokens,
            max_seqlen_kv=self._max_context,
        )
        # Graphs share their memory, and of all they compute only this is looked at.
        return (self._logits.keep(self._forward(numbers.ids, step, numbers.wanted)),)
