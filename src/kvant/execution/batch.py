"""The input tensors of a scheduled step, the launched step, and its outcome."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.attention.base import Step, with_groups
from kvant.attention.long import list_long
from kvant.sampling.sampler import greedy
from kvant.scheduling.request import Sequence
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule

Drafts = Items[tuple[int, ...]]
"""Draft tokens of each sequence of a schedule."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one forward: T tokens of n sequences.

    input_ids: [T] int64, sequences concatenated; -1 for a token that the step in flight produces, which
    only a sequence with one token may have. logits_index: [m] int64, indices into T whose logits are
    computed. num_sampled: the first num_sampled of the m rows choose tokens, one per sampling sequence and
    one per draft after it. first_rows: [n], each sequence's first row of the m; has no meaning for a
    sequence that gets no token in this step. scored: (sequence, first token, number of tokens) of prompts
    whose log-probabilities the remaining rows give.
    """

    input_ids: Tensor
    step: Step
    logits_index: Tensor
    num_sampled: int
    first_rows: list[int]
    scored: list[tuple[Sequence, int, int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's result on the host, by row of its logits.

    sound: whether the row's largest logit is finite. tokens: the row's token: the one sampled on the device
    if `is_final`, else the most likely one. first_rows: each sequence's first row; one more row follows per
    draft. drafts: the draft tokens that were run after each sequence's newest token, or None.
    """

    sound: list[bool]
    tokens: list[int]
    first_rows: list[int]
    drafts: Drafts | None
    is_final: bool


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that runs on the device. logits: [m, vocab_size], valid until the next launch.

    read: waits for the step and returns its outcome. is_final: the device chooses the tokens, so the next
    step may be launched before this one is read. batch: the inputs, if the host built them.
    """

    schedule: Schedule
    logits: Tensor
    read: Callable[[], Outcome]
    is_final: bool
    batch: Batch | None = None


def build_batch(
    schedule: Schedule, table: RowTable, page_size: int, drafts: Drafts | None = None
) -> Batch:
    """Builds the tensors of a step. Its starts must be exact: no unverified drafts may be in flight.

    drafts: tokens to run after each sequence's last token. Python loops over sequences only to read tokens.
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
    """Returns `Step.draft_states`. num_drafts: [n] int64, drafts of each sequence."""
    if schedule.max_drafts is None or not num_drafts.any():
        return None
    return tuple(np.where(num_drafts > 0, schedule.draft_states, -1).tolist())


def newest_tokens(schedule: Schedule) -> list[int]:
    """Returns each decode's newest token, or -1 if the step in flight produces it."""
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
    """Builds a `Step`. lengths: query tokens of each sequence. tables, slots: one array per page group."""
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
    return with_groups(
        step,
        [
            (torch.from_numpy(pages), torch.from_numpy(some))
            for pages, some in zip(tables[1:], slots[1:], strict=True)
        ],
    )


def _scored(schedule: Schedule) -> list[tuple[int, tuple[Sequence, int, int]]]:
    """Returns the prompt tokens to score, as (index in the schedule, (sequence, first token, count))."""
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
    """Returns a launched step whose tokens the host chooses from logits [m, vocab_size].

    logits: float32 or float64.
    """

    def read() -> Outcome:
        sound, tokens = greedy(logits[: batch.num_sampled])
        return Outcome(sound, tokens, batch.first_rows, drafts, is_final=False)

    return Launched(schedule, logits, read, is_final=False, batch=batch)
