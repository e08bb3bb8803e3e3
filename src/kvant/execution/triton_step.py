"""Triton kernels that prepare a recorded decode step and choose its tokens, in few launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvant.attention.base import Step, with_groups
from kvant.execution.device_state import DeviceState
from kvant.kernels.triton.device import arrivals

_STRETCH = 4096
_COLUMNS = 1024


def write_pages(state: DeviceState, index: Tensor, values: Tensor) -> None:
    """Writes page ids into `state.pages`. index: [m] int64, flat; -1 writes nothing. values: [m] int64."""
    block = 128
    grid = (triton.cdiv(len(index), block),)
    _write_pages[grid](state.pages, index, values, len(index), BLOCK=block, num_warps=4)


def gather_pages(
    state: DeviceState, rows: Tensor, seqlens: Tensor, tables: Tensor, page_size: int
) -> None:
    """Copies the used page ids of `rows` from `state.pages` into tables [groups, n, columns] int32.

    rows: [n] int64. seqlens: [n] int32. Entries of tables after a sequence's end are left unchanged.
    """
    for group, table in enumerate(tables.unbind()):
        _gather_group(state.pages_of(group), rows, seqlens, table, page_size)


def _gather_group(
    pages: Tensor, rows: Tensor, seqlens: Tensor, table: Tensor, page_size: int
) -> None:
    grid = (len(rows), triton.cdiv(table.shape[1], _COLUMNS))
    _gather_pages[grid](
        rows, seqlens, pages, pages.stride(0), table, table.stride(0),
        PAGE=page_size, COLUMNS=table.shape[1], BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip


def plain_step(
    rows: Tensor, tokens: Tensor, starts: Tensor, counts: Tensor, limits: Tensor, state: DeviceState,
    tables: Tensor, page_size: int, max_model_len: int,
) -> tuple[Tensor, Step]:  # fmt: skip
    """Lays out a step like `graphs.lay_out`, without drafts. Returns the tokens [n] int64 and the step.

    tables: [groups, n, columns] int32, overwritten with the rows' page ids.
    """
    count = rows.shape[0]
    cu_seqlens = rows.new_empty(count + 1, dtype=torch.int32)
    seqlens = rows.new_empty(count, dtype=torch.int32)
    slots, ids, positions = (torch.empty_like(rows) for _ in range(3))
    _lay_out[(count,)](
        rows, tokens, starts, counts, limits, state.tokens, state.lengths, state.pages,
        state.pages.stride(0), cu_seqlens, seqlens, slots, ids, positions,
        PAGE=page_size, COLUMNS=tables.shape[2], num_warps=1,
    )  # fmt: skip
    gather_pages(state, rows, seqlens, tables, page_size)
    step = Step(
        cu_seqlens_q=cu_seqlens,
        seqlens_kv=seqlens,
        page_table=tables[0],
        slot_mapping=slots,
        positions=positions,
        max_seqlen_q=1,
        max_seqlen_kv=max_model_len,
        rows=rows,
    )
    others = [
        (table, _slots_in(state.pages_of(1 + place), rows, slots, positions, page_size))
        for place, table in enumerate(tables[1:].unbind())
    ]
    return ids, with_groups(step, others)


def _slots_in(
    pages: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, page_size: int
) -> Tensor:
    """Returns a decode step's slots [n] int64 in another group, whose page table is `pages`."""
    found = torch.empty_like(slots)
    _other_slots[(len(rows),)](
        rows, slots, positions, pages, pages.stride(0), found, PAGE=page_size, num_warps=1
    )
    return found


def most_likely(
    logits: Tensor, rows: Tensor, positions: Tensor, counts: Tensor, state: DeviceState,
    kept: Tensor | None = None, wanted: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Chooses each row's most likely token and stores it as its sequence's newest token in `state`.

    logits: [n, vocab_size] floats, which may hold NaN and infinities. rows, positions: [n] int64, the
    sequence's row and the position of the token before. counts: [n] integers, 0 for padding rows. kept: [n,
    vocab_size] in the dtype of logits or a wider one, to which rows are copied by the way. wanted: [n]
    integers, 0 for rows that are not copied; None copies all. Returns [2 n] int64: whether each row's largest
    logit is finite, then the tokens, -1 for padding. The first of equal logits is chosen.
    """
    count, size = logits.shape
    found = rows.new_empty(2 * count)
    stretches = triton.cdiv(size, _STRETCH)
    best = logits.new_empty(count, stretches)
    places = rows.new_empty(count, stretches, dtype=torch.int32)
    _most_likely[(count, stretches)](
        logits, logits.stride(0), kept, 0 if kept is None else kept.stride(0), wanted, size, rows, positions,
        counts, best, places, arrivals(logits.device, count), found, state.tokens, state.lengths, count,
        stretches,
        STRETCH=_STRETCH, PAD=triton.next_power_of_2(stretches), KEEPS=kept is not None, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=("count",))
def _write_pages(pages, index, values, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + i, mask=i < count, other=-1)
    value = tl.load(values + i, mask=i < count, other=0)
    tl.store(pages + at, value.to(tl.int32), mask=at >= 0)


@triton.jit(do_not_specialize=("stride",))
def _lay_out(rows, tokens, starts, counts, limits, newest, lengths, pages, stride, cu_seqlens,
             seqlens, slots, ids, positions, PAGE: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """One program per sequence. A negative token or start means the value in the sequence's row."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    start = tl.load(starts + i)
    start = tl.where(start < 0, tl.load(lengths + row), start)
    token = tl.load(tokens + i)
    token = tl.where(token < 0, tl.load(newest + row), token)
    is_there = (tl.load(counts + i) > 0) & (start < tl.load(limits + i))
    start = tl.where(is_there, start, 0)
    column = tl.minimum(start // PAGE, COLUMNS - 1)
    page = tl.load(pages + row * stride + column).to(tl.int64)
    tl.store(ids + i, tl.where(is_there, token, 0))
    tl.store(positions + i, start)
    tl.store(seqlens + i, tl.where(is_there, start + 1, 0).to(tl.int32))
    tl.store(slots + i, tl.where(is_there, page * PAGE + start % PAGE, -1))
    tl.store(cu_seqlens + i + 1, i + 1)
    if i == 0:
        tl.store(cu_seqlens, 0)


@triton.jit(do_not_specialize=("stride",))
def _other_slots(rows, slots, positions, pages, stride, found, PAGE: tl.constexpr):
    """One program per sequence. If the first group stores nothing (slot -1), no other group does."""
    i = tl.program_id(0)
    at = tl.load(positions + i)
    page = tl.load(pages + tl.load(rows + i) * stride + at // PAGE).to(tl.int64)
    slot = tl.where(tl.load(slots + i) < 0, -1, page * PAGE + at % PAGE)
    tl.store(found + i, slot)


@triton.jit(do_not_specialize=("stride", "out_stride"))
def _gather_pages(rows, seqlens, pages, stride, table, out_stride, PAGE: tl.constexpr,
                  COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program per BLOCK columns of a sequence."""
    i = tl.program_id(0)
    used = tl.minimum((tl.load(seqlens + i) + PAGE - 1) // PAGE, COLUMNS)
    first = tl.program_id(1) * BLOCK
    if first < used:
        c = first + tl.arange(0, BLOCK)
        row = tl.load(rows + i)
        found = tl.load(pages + row * stride + c, mask=c < used)
        tl.store(table + i.to(tl.int64) * out_stride + c, found, mask=c < used)


@triton.jit(do_not_specialize=("count",))
def _most_likely(logits, stride, kept, kept_stride, wanted, size, rows, positions, counts, best, places,
                 arrived, found, newest, lengths, count, stretches,
                 STRETCH: tl.constexpr, PAD: tl.constexpr, KEEPS: tl.constexpr):  # fmt: skip
    """One program per stretch of a row of logits; the row's last program compares all stretches.

    best: [n, stretches], the largest logit of each stretch, +Inf if it holds NaN. places: its index. KEEPS:
    the program copies its stretch to `kept`, if its row is `wanted`.
    """
    row = tl.program_id(0)
    stretch = tl.program_id(1)
    c = stretch * STRETCH + tl.arange(0, STRETCH)
    x = tl.load(logits + row.to(tl.int64) * stride + c, mask=c < size, other=float("-inf"))
    if KEEPS:
        end = size
        if wanted is not None:
            end = tl.where(tl.load(wanted + row) != 0, size, 0)
        at_kept = kept + row.to(tl.int64) * kept_stride + c
        tl.store(at_kept, x.to(kept.dtype.element_ty), mask=c < end)
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
        is_there = tl.load(counts + row) > 0
        tl.store(found + row, (sound | (is_there == 0)).to(tl.int64))
        tl.store(found + count + row, tl.where(is_there, chosen, -1))
        owner = tl.load(rows + row)
        tl.store(newest + owner, chosen, mask=is_there)
        tl.store(lengths + owner, tl.load(positions + row) + 1, mask=is_there)
        tl.store(arrived + row, 0)
