"""From a schedule to the tensors of one forward."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.attention.base import Step
from kvant.attention.long import list_long
from kvant.scheduling.page_table import PageTable
from kvant.scheduling.request import Sequence
from kvant.scheduling.schedule import Chunk


@dataclass(frozen=True, slots=True)
class Batch:
    """input_ids: [T] int64, the chunks behind each other. logits_index: [n] int64, places in T.

    sampled: the sequences whose next token follows at the first of those places, in that order; one
    with drafts stands there once more for each of them. scored:
    chunks the log-probabilities of whose prompt tokens the other places give, `num_scored` of each.
    """

    input_ids: Tensor
    step: Step
    logits_index: Tensor
    sampled: list[Sequence]
    scored: list[Chunk]


def build_batch(
    chunks: Items[Chunk], page_table: PageTable, page_size: int, *, num_unknown: int = 0
) -> Batch:
    """A batch on the host. Loops over sequences only read; everything is computed for all at once.

    num_unknown: the first chunks are one token each that nobody knows yet; 0 stands for it.
    """
    count = len(chunks)
    sequences, firsts, counts, _, drafts = zip(*chunks, strict=True)
    starts = np.array(firsts, np.int64)
    known = starts + np.array(counts, np.int64)
    num_drafts = np.array([len(d) for d in drafts], np.int64)
    lengths = known - starts + num_drafts
    rows = np.array([s.row for s in sequences], np.int64)
    cu_seqlens = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    seqlens_kv = starts + lengths
    longest = int(seqlens_kv.max())
    table = page_table.rows(rows, -(-longest // page_size))

    if cu_seqlens[-1] == count:  # one token each
        owners, positions = np.arange(count), starts
    else:
        owners = np.repeat(np.arange(count), lengths)
        positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - starts, lengths)
    pages = table[owners, positions // page_size].astype(np.int64)
    slots = pages * page_size + positions % page_size

    # As `Chunk.num_rows`, of all at once.
    samples = known == np.array([len(s.token_ids) for s in sequences], np.int64)
    samples[:num_unknown] = True
    num_rows = np.where(samples, 1 + num_drafts, 0)
    before = np.cumsum(num_rows) - num_rows
    logits_index = np.repeat(cu_seqlens[1:] - num_rows - before, num_rows)
    logits_index += np.arange(len(logits_index))
    sampled = np.repeat(np.arange(count), num_rows).tolist()
    scored = [c for c in chunks if c[0].prompt_logprobs is not None and num_scored(c)]
    if scored:
        begins = {id(c): begin for c, begin in zip(chunks, cu_seqlens.tolist(), strict=False)}
        inner = [np.arange(begins[id(c)], begins[id(c)] + num_scored(c)) for c in scored]
        logits_index = np.concatenate([logits_index, *inner])
    step = list_long(_step(lengths, seqlens_kv, table, slots, positions), lengths, seqlens_kv)
    if not scored and 0 < len(logits_index) < len(positions):
        of_them = num_rows, seqlens_kv, table
        if not num_rows.all():
            have = np.flatnonzero(num_rows)
            of_them = num_rows[have], seqlens_kv[have], table[have]
        wanted = _step(*of_them, slots[logits_index], positions[logits_index])
        step = replace(step, wanted=wanted)
    return Batch(
        input_ids=torch.from_numpy(np.frombuffer(_tokens(chunks, num_unknown), np.int64)),
        step=step,
        logits_index=torch.from_numpy(logits_index),
        sampled=[sequences[i] for i in sampled],
        scored=scored,
    )


def _step(
    lengths: NDArray[np.int64],
    seqlens_kv: NDArray[np.int64],
    table: NDArray[np.int32],
    slots: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> Step:
    """lengths: query tokens of each sequence. The rest as in `Step`."""
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return Step(
        cu_seqlens_q=torch.from_numpy(cu_seqlens),
        seqlens_kv=torch.from_numpy(seqlens_kv.astype(np.int32)),
        page_table=torch.from_numpy(table),
        slot_mapping=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(seqlens_kv.max()),
    )


def num_scored(chunk: Chunk) -> int:
    """Of the chunk's first tokens, how many are followed by a prompt token with a log-probability asked."""
    if not chunk.sequence.lacks_prompt_logprobs:
        return 0
    last = chunk.sequence.num_prompt_tokens - 1
    return min(chunk.start + chunk.num_tokens, last) - chunk.start


def _tokens(chunks: Items[Chunk], num_unknown: int) -> array[int]:
    tokens = [0] * num_unknown
    for sequence, start, length, _, drafts in chunks[num_unknown:]:
        if length == 1:  # most chunks: a slice would copy a list to take one number
            tokens.append(sequence.token_ids[start])
        else:
            tokens += sequence.token_ids[start : start + length]
        if drafts:
            tokens += drafts
    return array("q", tokens)  # several times faster than numpy
