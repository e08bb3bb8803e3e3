"""A scheduled step as the tensors of one forward, the launched step, and what it found."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.attention.base import Step, through
from kvant.attention.long import list_long
from kvant.sampling.sampler import greedy
from kvant.scheduling.request import Sequence
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule

Drafts = Items[tuple[int, ...]]
"""Draft tokens of each sequence of a schedule."""


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of n sequences.

    input_ids: [T] int64, one sequence behind the other; -1 for a token that the step in flight finds,
    which only a sequence with one token has. logits_index: [m] int64, places in T whose logits are
    wanted. num_sampled: the first of these, which choose tokens: one per sequence that samples, and one
    per draft behind it. first_rows: [n], each sequence's first row among them; meaningless where it
    does not sample. scored: (sequence, first token, number of tokens) of prompts whose tokens the other
    rows score.
    """

    input_ids: Tensor
    step: Step
    logits_index: Tensor
    num_sampled: int
    first_rows: list[int]
    scored: list[tuple[Sequence, int, int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step found, by row of its logits.

    sound: whether the row's largest logit is finite. tokens: the row's token: the most likely one or,
    where `is_final`, the one that was sampled on the device. first_rows: each sequence's first row, one
    more per draft. drafts: tokens that were run behind each sequence's last one, or None.
    """

    sound: list[bool]
    tokens: list[int]
    first_rows: list[int]
    drafts: Drafts | None
    is_final: bool


@dataclass(frozen=True, slots=True)
class Launched:
    """logits: [m, vocab_size], valid until the next launch. read: waits for the step.

    batch: what was run, where the host built it. is_final: whether `Outcome` will be, so that the next
    step may be launched before this one is read.
    """

    schedule: Schedule
    logits: Tensor
    read: Callable[[], Outcome]
    is_final: bool
    batch: Batch | None = None


def build_batch(
    schedule: Schedule, table: RowTable, page_size: int, drafts: Drafts | None = None
) -> Batch:
    """Build the tensors of a step whose starts are exact. Loops over sequences only read tokens.

    drafts: of each sequence, behind its last token.
    """
    assert schedule.limits is None, "positions depend on drafts that are not verified"
    starts, rows = schedule.starts, schedule.rows
    count = len(rows)
    lengths = schedule.counts
    num_drafts = np.zeros(count, np.int64)
    if drafts is not None:
        num_drafts = np.array([len(one) for one in drafts], np.int64)
        lengths = lengths + num_drafts
    cu_seqlens = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    seqlens_kv = starts + lengths
    columns = -(-int(seqlens_kv.max()) // page_size)
    tables = [table.page_table(rows, columns, group) for group in range(table.num_groups)]

    if cu_seqlens[-1] == count:  # one token each
        owners, positions = np.arange(count), starts
    else:
        owners = np.repeat(np.arange(count), lengths)
        positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - starts, lengths)
    within, columns_of = positions % page_size, positions // page_size
    slots = [pages[owners, columns_of].astype(np.int64) * page_size + within for pages in tables]

    num_rows = np.where(schedule.samples, 1 + num_drafts, 0)
    before = np.cumsum(num_rows) - num_rows
    logits_index = np.repeat(cu_seqlens[1:] - num_rows - before, num_rows)
    logits_index += np.arange(len(logits_index))
    num_sampled = len(logits_index)
    scored = _scored(schedule)
    if scored:
        inner = [cu_seqlens[place] + np.arange(length) for place, (_, _, length) in scored]
        logits_index = np.concatenate([logits_index, *inner])
    step = _step(lengths, seqlens_kv, tables, slots, positions)
    alone = replace(step, others=())
    listed = [list_long(one, lengths, seqlens_kv) for one in (alone, *step.others)]
    step = replace(
        listed[0],
        others=tuple(listed[1:]),
        rows=torch.from_numpy(rows),
        lengths=None if step.max_seqlen_q == 1 else tuple(lengths.tolist()),
        draft_states=_draft_states(schedule, num_drafts),
    )
    if not scored and 0 < num_sampled < len(positions):
        have = slice(None) if num_rows.all() else np.flatnonzero(num_rows)
        wanted = _step(
            num_rows[have], seqlens_kv[have], [pages[have] for pages in tables],
            [some[logits_index] for some in slots], positions[logits_index],
        )  # fmt: skip
        step = replace(step, wanted=wanted)
    return Batch(
        input_ids=torch.from_numpy(np.frombuffer(_tokens(schedule, drafts), np.int64)),
        step=step,
        logits_index=torch.from_numpy(logits_index),
        num_sampled=num_sampled,
        first_rows=before.tolist(),
        scored=[piece for _, piece in scored],
    )


def _draft_states(schedule: Schedule, num_drafts: NDArray[np.int64]) -> tuple[int, ...] | None:
    """`Step.draft_states` of a step with these drafts of each sequence."""
    if schedule.max_drafts is None or not num_drafts.any():
        return None
    return tuple(np.where(num_drafts > 0, schedule.draft_states, -1).tolist())


def newest_tokens(schedule: Schedule) -> list[int]:
    """The token of each decode; -1 where the step in flight finds it."""
    decodes = schedule.sequences[: schedule.num_decodes]
    is_pending = schedule.is_pending[: len(decodes)]
    if is_pending.all():
        return [-1] * len(decodes)
    if not is_pending.any():
        return [sequence.token_ids[-1] for sequence in decodes]
    return [
        -1 if pending else sequence.token_ids[-1]
        for sequence, pending in zip(decodes, is_pending.tolist(), strict=True)
    ]


def _step(
    lengths: NDArray[np.int64],
    seqlens_kv: NDArray[np.int64],
    tables: Items[NDArray[np.int32]],
    slots: Items[NDArray[np.int64]],
    positions: NDArray[np.int64],
) -> Step:
    """lengths: query tokens of each sequence. tables, slots: of each group. The rest as in `Step`."""
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    step = Step(
        cu_seqlens_q=torch.from_numpy(cu_seqlens),
        seqlens_kv=torch.from_numpy(seqlens_kv.astype(np.int32)),
        page_table=torch.from_numpy(tables[0]),
        slot_mapping=torch.from_numpy(slots[0]),
        positions=torch.from_numpy(positions),
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(seqlens_kv.max()),
    )
    return through(
        step,
        [
            (torch.from_numpy(pages), torch.from_numpy(some))
            for pages, some in zip(tables[1:], slots[1:], strict=True)
        ],
    )


def _scored(schedule: Schedule) -> list[tuple[int, tuple[Sequence, int, int]]]:
    """Pieces whose tokens are followed by prompt tokens to score: place, sequence, first, how many."""
    found = []
    for place in range(schedule.num_decodes, len(schedule.sequences)):
        sequence = schedule.sequences[place]
        if sequence.lacks_prompt_logprobs:
            start, length = int(schedule.starts[place]), int(schedule.counts[place])
            count = min(start + length, sequence.num_prompt_tokens - 1) - start
            if count:
                found.append((place, (sequence, start, count)))
    return found


def _tokens(schedule: Schedule, drafts: Drafts | None) -> array[int]:
    tokens = newest_tokens(schedule)
    first = len(tokens)
    if drafts is not None:
        tokens = [
            token
            for newest, draft in zip(tokens, drafts, strict=False)
            for token in (newest, *draft)
        ]
    pieces = zip(
        schedule.sequences[first:], schedule.starts[first:].tolist(),
        schedule.counts[first:].tolist(), strict=True,
    )  # fmt: skip
    for sequence, start, length in pieces:
        tokens += sequence.token_ids[start : start + length]
    return array("q", tokens)  # several times as fast as numpy


def on_host(schedule: Schedule, batch: Batch, drafts: Drafts | None, logits: Tensor) -> Launched:
    """A step whose tokens the host chooses from logits [m, vocab_size]."""

    def read() -> Outcome:
        sound, tokens = greedy(logits[: batch.num_sampled])
        return Outcome(sound, tokens, batch.first_rows, drafts, is_final=False)

    return Launched(schedule, logits, read, is_final=False, batch=batch)
