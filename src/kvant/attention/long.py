"""Sequences of a step with many queries: finds them when the step is built; attends to them separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvant.attention.base import AttentionBackend, AttentionParams, LongQuery, Step
from kvant.attention.need import LONG
from kvant.kv.pool import LayerCache

AttendLong = Callable[[LayerCache, Tensor, Tensor, Step, AttentionParams], None]
"""Writes the rows of `Step.long` in its third argument [T, num_q_heads, head_dim_v]."""


def list_long(step: Step, lengths: NDArray[np.int64], seqlens_kv: NDArray[np.int64]) -> Step:
    """Returns the step with its long sequences listed, and the sequences before them as a separate step.

    lengths: [num_seqs], query tokens of each sequence; seqlens_kv: [num_seqs], as in the step; both on the
    host. Long sequences must come last; others are treated as short ones, which is slower.
    """
    short = np.flatnonzero(lengths < LONG)
    count = int(short[-1]) + 1 if short.size else 0
    if count == lengths.size:
        return step
    first = np.cumsum(lengths) - lengths
    listed = tuple(
        LongQuery(i, int(first[i]), int(lengths[i]), int(seqlens_kv[i]))
        for i in range(count, lengths.size)
    )
    if not count:
        return replace(step, long=listed)
    tokens = listed[0].first_token
    rest = replace(
        step,
        cu_seqlens_q=step.cu_seqlens_q[: count + 1],
        seqlens_kv=step.seqlens_kv[:count],
        page_table=step.page_table[:count],
        slot_mapping=step.slot_mapping[:tokens],
        positions=step.positions[:tokens],
        max_seqlen_q=int(lengths[:count].max()),
        max_seqlen_kv=int(seqlens_kv[:count].max()),
    )
    return replace(step, long=listed, rest=rest)


def attend_apart(
    few: AttentionBackend,
    attend_long: AttendLong,
    cache: LayerCache,
    q: Tensor,
    step: Step,
    params: AttentionParams,
) -> Tensor:
    """Attends to long sequences by `attend_long` and to the others by `few`.

    q: [T, num_q_heads, head_dim_k]. Returns [T, num_q_heads, head_dim_v] in q's dtype. The tokens of
    `step.long` come after all others; tokens after them get zeros.
    """
    if not step.long:
        return few.attend(cache, q, step, params)
    out = q.new_empty(q.shape[0], q.shape[1], cache.spec.geometry.head_dim_v)
    first, last = step.long[0], step.long[-1]
    if step.rest is not None:
        mine = slice(0, first.first_token)
        out[mine] = few.attend(cache, q[mine], step.rest, params)
    end = last.first_token + last.num_tokens
    if end < q.shape[0]:
        out[end:].zero_()
    attend_long(cache, q, out, step, params)
    return out


def together(long: Sequence[LongQuery], at_once: int) -> Iterator[Sequence[LongQuery]]:
    """Groups neighbours whose keys are decoded together, padded to the longest of them.

    at_once: maximum number of keys of more than one sequence; 0 keeps every sequence alone.
    """
    start = 0
    for end in range(1, len(long) + 1):
        longest = max(one.length for one in long[start : end + 1])
        if end == len(long) or (end + 1 - start) * longest > at_once:
            yield long[start:end]
            start = end
