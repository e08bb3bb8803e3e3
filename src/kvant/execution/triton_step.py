"""What a recorded step of single tokens needs before and after the model, in one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvant.attention.base import Step
from kvant.kernels.triton.device import arrivals

_STRETCH = 4096


def plain_step(
    starts: Tensor, ends: Tensor, table: Tensor, page_size: int, max_model_len: int
) -> Step:
    """As `kvant.execution.layout.lay_out` without drafts."""
    count = starts.shape[0]
    cu_seqlens = starts.new_empty(count + 1, dtype=torch.int32)
    seqlens = starts.new_empty(count, dtype=torch.int32)
    slots = torch.empty_like(starts)
    block = 128
    _lay_out[(triton.cdiv(count + 1, block),)](
        starts, ends, table, table.stride(0), cu_seqlens, seqlens, slots, count, PAGE=page_size,
        COLUMNS=table.shape[1], BLOCK=block, num_warps=4,
    )  # fmt: skip
    return Step(
        cu_seqlens_q=cu_seqlens,
        seqlens_kv=seqlens,
        page_table=table,
        slot_mapping=slots,
        positions=starts,
        max_seqlen_q=1,
        max_seqlen_kv=max_model_len,
    )


def likeliest(logits: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    """What a recorded step without drafts has found, [6 n], as `kvant.execution.launched` keeps it.

    logits: [n, vocab_size] float32, any row of which may hold NaN or infinities. tokens, starts: [n]
    int64. Of equal logits the first is chosen.
    """
    count, size = logits.shape
    found = starts.new_empty(6 * count)
    stretches = triton.cdiv(size, _STRETCH)
    best = logits.new_empty(count, stretches)
    places = starts.new_empty(count, stretches, dtype=torch.int32)
    _likeliest[(count, stretches)](
        logits, logits.stride(0), size, tokens, starts, best, places,
        arrivals(logits.device, count), found, count, stretches,
        STRETCH=_STRETCH, PAD=triton.next_power_of_2(stretches), num_warps=4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=("count", "stride"))
def _lay_out(starts, ends, table, stride, cu_seqlens, seqlens, slots, count,
             PAGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(cu_seqlens + i, i, mask=i <= count)
    there = i < count
    start = tl.load(starts + i, mask=there, other=0)
    written = there & (start < tl.load(ends + i, mask=there, other=0))
    tl.store(seqlens + i, tl.where(written, start + 1, 0).to(tl.int32), mask=there)
    column = tl.minimum(start // PAGE, COLUMNS - 1)
    page = tl.load(table + i.to(tl.int64) * stride + column, mask=written, other=0).to(tl.int64)
    slot = page * PAGE + start % PAGE
    tl.store(slots + i, tl.where(written, slot, -1), mask=there)


@triton.jit(do_not_specialize=("count",))
def _likeliest(logits, stride, size, tokens, starts, best, places, arrived, found, count,
               stretches, STRETCH: tl.constexpr, PAD: tl.constexpr):  # fmt: skip
    """Program: a stretch of a row; the last one of a row to end compares what all have found.

    best: [n, stretches], the largest number of each, +Inf where there is NaN. places: where it stands.
    """
    row = tl.program_id(0)
    stretch = tl.program_id(1)
    c = stretch * STRETCH + tl.arange(0, STRETCH)
    x = tl.load(logits + row.to(tl.int64) * stride + c, mask=c < size, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    at = tl.min(tl.where((x == top) & (c < size), c, size - 1), 0)
    tl.store(best + row * stretches + stretch, top)
    tl.store(places + row * stretches + stretch, at)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel")
    if before == stretches - 1:
        s = tl.arange(0, PAD)
        there = s < stretches
        tops = tl.load(best + row * stretches + s, mask=there, other=float("-inf"),
                       cache_modifier=".cg")  # fmt: skip
        spots = tl.load(places + row * stretches + s, mask=there, other=size - 1,
                        cache_modifier=".cg")  # fmt: skip
        highest = tl.max(tops, 0)
        chosen = tl.min(tl.where(tops == highest, spots, size - 1), 0).to(tl.int64)
        sound = (highest < float("inf")) & (highest > float("-inf"))
        tl.store(found + row, tl.load(tokens + row))
        tl.store(found + count + row, sound.to(tl.int64))
        tl.store(found + 2 * count + row, chosen)
        tl.store(found + 3 * count + row, chosen)
        tl.store(found + 4 * count + row, tl.load(starts + row) + 1)
        tl.store(found + 5 * count + row, tl.full((), 1, tl.int64))
        tl.store(arrived + row, 0)
