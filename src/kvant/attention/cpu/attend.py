"""Attention of one step over pages: splits the work, distributes it to threads, joins the parts.

    queries of a sequence   tiles of up to QUERY_ROWS rows (a row: one query of one query head)
    its keys                splits with fixed ends, TILE keys at a time

Every split has its own softmax; splits are joined in order.
If a sequence has one query tile only, each split is an item of work, and the thread that finishes
last joins the splits; otherwise one item takes all splits in turn. The arithmetic is the same,
and no boundary depends on other queries or on the number of threads. So a query's result has the
same bits for any batch, chunk size or number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvant.attention.cpu.inner import (
    TILE,
    blend_rows,
    exp_of,
    mask_scores,
    scale_row,
    weights_of,
)  # fmt: skip
from kvant.attention.cpu.layout import Call, Item, Real, Scaling, Tile
from kvant.attention.cpu.rotate import rotate_in_place
from kvant.kernels.cpu.compiled import Entry, compiled_entry, compiled_worker
from kvant.kernels.cpu.vector import (
    fetch_add,
    float_of,
    fork,
    load_bf16,
    load_f16,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    prefetch_line,
    run_at,
    store_bf16,
    store_f16,
    store_f32,
    store_i32,
    store_i64,
)  # fmt: skip
from kvant.kernels.cpu.vector import (
    zero as _zero,
)
from kvant.kv.codecs.int4_short import DROPPED_BITS as SHORT_DROPPED
from kvant.kv.codecs.int4_short import NAN_WORD as SHORT_NAN
from kvant.kv.codecs.int4_short import OFFSET as SHORT_OFFSET

QUERY_ROWS = 96
HEAD_ROWS = 48  # rows of an item that takes several KV heads
LONGEST_SPLIT = 2048
SCALARS = 64  # bytes before a part's sums: the largest score, sum of weights, sum of offsets
_MINUS_INFINITY = np.float32(-np.inf)
_LOWEST = np.float32(-3e38)
_NAN = np.float32(np.nan)
_ZERO, _ONE = np.float32(0), np.float32(1)

_LINE = 64
_SLOTS_BYTES = 8 * (LONGEST_SPLIT + 2 * TILE)
WORTH_A_THREAD = 400_000
"""Multiply-adds of queries and cache below which a second thread costs more than it saves."""


def scratch_bytes(head_dim_k: int, head_dim_v: int, group: int) -> int:
    """Returns scratch bytes per thread, in the order in which `_run_item` uses them."""
    rows = max(QUERY_ROWS, HEAD_ROWS, group)
    floats = (
        rows * head_dim_k  # queries
        + rows * TILE  # scores
        + 2 * rows * (head_dim_v + SCALARS // 4)  # a split's parts and their sum
        + 2 * head_dim_k * TILE  # words, expanded keys
        + TILE * head_dim_v  # expanded values
        + TILE * (head_dim_k + head_dim_v) // 16  # block scales
        + 8 * TILE
        + 8 * rows
        + head_dim_v
    )
    return 4 * floats + 4 * _SLOTS_BYTES + int(Tile.END) + 32 * _LINE


@njit(inline="always")
def _split_start(split: int) -> int:
    """Returns the first key of a split: 8 splits of 256, 12 of 512, 24 of 1024, then 2048 each."""
    if split <= 8:
        return 256 * split
    if split <= 20:
        return 2048 + 512 * (split - 8)
    if split <= 44:
        return 8192 + 1024 * (split - 20)
    return 32768 + 2048 * (split - 44)


@njit(inline="always")
def _split_of(key: int) -> int:
    if key < 2048:
        return key // 256
    if key < 8192:
        return 8 + (key - 2048) // 512
    if key < 32768:
        return 20 + (key - 8192) // 1024
    return 44 + (key - 32768) // 2048


@njit(inline="always")
def _first_seen(call: int, position: int) -> int:
    """Returns the first key that the query at a position reads."""
    window, floor = load_i64(call + Call.WINDOW), load_i64(call + Call.FLOOR)
    return floor if window == 0 else max(floor, position - window + 1)


@njit(inline="always")
def _end_seen(call: int, position: int, length: int) -> int:
    """Returns the end of the keys that the query at a position reads.

    Not before their begin if it reads none.
    """
    window, ceiling = load_i64(call + Call.WINDOW), load_i64(call + Call.CEILING)
    if ceiling:
        length = min(length, ceiling)
    if load_i64(call + Call.CAUSAL):
        return min(length, position + 1 - load_i64(call + Call.LAG))
    return length if window == 0 else min(length, position + window)


@njit(inline="always")
def _number(address: int, real: int) -> Any:
    if real == Real.FLOAT16:
        return load_f16(address)
    if real == Real.BFLOAT16:
        return load_bf16(address)
    return load_f32(address)


@njit(error_model="numpy")
def _load_query(call: int, token: int, head: int, kv_head: int, to: int) -> Any:
    """Loads one row of q as float32, times a score's constant factors; returns its sum."""
    head_dim, real = load_i64(call + Call.K_HEAD_DIM), load_i64(call + Call.Q_REAL)
    size = 4 if real != Real.FLOAT16 and real != Real.BFLOAT16 else 2
    start = load_i64(call + Call.Q) + token * load_i64(call + Call.Q_TOKEN_STRIDE)
    start += head * load_i64(call + Call.Q_HEAD_STRIDE)
    for i in range(head_dim):
        store_f32(to + 4 * i, _number(start + size * i, real))
    factor = float_of(load_i64(call + Call.SCALE)) * float_of(load_i64(call + Call.K_FACTOR))
    outer = load_i64(call + Call.K_OUTER)
    if outer:
        factor *= load_f32(outer + 4 * (kv_head if load_i64(call + Call.K_OUTERS) > 1 else 0))
    if load_i64(call + Call.K_ROTATED):
        rotate_in_place(to, head_dim)
    total = _ZERO
    for i in range(head_dim):
        x = load_f32(to + 4 * i) * factor
        store_f32(to + 4 * i, x)
        total += x
    return total


@njit(inline="always")
def _scale_bytes(scaling: int, blocks: int) -> int:
    """Returns the bytes of a row's scales in its page."""
    if scaling == Scaling.BLOCK:
        return blocks
    if scaling in (Scaling.ROW_HALF, Scaling.ROW_SHORT):
        return 2
    return 4 if scaling != Scaling.NONE else 0


@njit(error_model="numpy")
def _row_scales(planes: int, scaling: int, slots: int, scales: int, offsets: int) -> None:
    """Writes scale and offset of a tile's rows, which begin at planes + slots[t]: float32 [TILE] each."""
    if scaling == Scaling.ROW:
        for t in range(TILE):
            store_f32(scales + 4 * t, load_f32(planes + load_i64(slots + 8 * t)))
            if t % 4 == 0:
                prefetch_line(planes + load_i64(slots + 8 * (t + TILE)))
    elif scaling == Scaling.ROW_ZERO_POINT:
        for t in range(TILE):
            bits = load_i32(planes + load_i64(slots + 8 * t))
            scale = float_of(bits & ~15)
            store_f32(scales + 4 * t, scale)
            store_f32(offsets + 4 * t, -scale * np.float32(bits & 15))
            if t % 4 == 0:
                prefetch_line(planes + load_i64(slots + 8 * (t + TILE)))
    elif scaling == Scaling.ROW_SHORT:
        for t in range(TILE):
            at = planes + load_i64(slots + 8 * t)
            word = load_u8(at) | (load_u8(at + 1) << 8)
            scale = float_of(((word >> 4) + SHORT_OFFSET) << SHORT_DROPPED)
            if word >= SHORT_NAN:
                scale = _NAN
            store_f32(scales + 4 * t, scale)
            store_f32(offsets + 4 * t, -scale * np.float32(word & 15))
    elif scaling == Scaling.ROW_HALF:
        for t in range(TILE):
            store_f32(scales + 4 * t, load_f16(planes + load_i64(slots + 8 * t)))
    elif scaling == Scaling.ROW_HALF_OFFSET:
        for t in range(TILE):
            at = planes + load_i64(slots + 8 * t)
            store_f32(scales + 4 * t, load_f16(at))
            store_f32(offsets + 4 * t, load_f16(at + 2))


@njit(error_model="numpy")
def _block_scales(
    planes: int, slots: int, blocks: int, numbers: int, to: int, row: int, column: int
) -> None:
    """Writes scales of a tile's blocks of 16 as float32; row t, block i to `to + row * t + column * i`."""
    for t in range(TILE):
        at = planes + load_i64(slots + 8 * t)
        for i in range(blocks):
            store_f32(to + row * t + column * i, load_f32(numbers + 4 * load_u8(at + i)))


@njit(error_model="numpy")
def _fold(into: int, part: int, head_dim: int) -> None:
    """Adds a split's part (largest score, sums) to the parts before it."""
    largest = load_f32(part)
    if largest == _MINUS_INFINITY:
        return  # no query sees its keys
    before = load_f32(into)
    if before == _MINUS_INFINITY:
        both, kept, factor = largest, _ZERO, _ONE
    else:
        both = max(before, largest)
        kept, factor = exp_of(before - both), exp_of(largest - both)
    store_f32(into, both)
    for i in (4, 8):
        store_f32(into + i, load_f32(into + i) * kept + load_f32(part + i) * factor)
    blend_rows(into + SCALARS, kept, part + SCALARS, factor, head_dim)


@njit(inline="always")
def _clear(part: int, head_dim: int) -> None:
    store_f32(part, _MINUS_INFINITY)
    for i in range(1, SCALARS // 4 + head_dim):
        store_f32(part + 4 * i, _ZERO)


@njit(error_model="numpy")
def _blend(row: int, out: int, state: int, largest: Any, total: Any, head_dim: int) -> None:
    """Joins a finished row with the row in `out`, computed from other keys, into `row`; updates the state."""
    before, sums = load_f32(state), load_f32(state + 4)
    if sums == _ZERO:
        kept, factor, both = _ZERO, _ONE, largest
    elif total == _ZERO:
        kept, factor, both = _ONE, _ZERO, before
    else:
        both = max(before, largest)
        kept, factor = sums * exp_of(before - both), total * exp_of(largest - both)
    whole = kept + factor
    for i in range(head_dim):
        x = load_f32(out + 4 * i) * kept + load_f32(row + 4 * i) * factor
        store_f32(row + 4 * i, x / whole)
    store_f32(state, both)
    store_f32(state + 4, sums if total == _ZERO else (total if sums == _ZERO else whole))


@njit(error_model="numpy")
def _finish(call: int, part: int, token: int, head: int, kv_head: int, row: int) -> None:
    """Divides by the sum of weights, undoes the rotation, and writes one output row.

    row: scratch, float32 [head_dim].
    """
    head_dim = load_i64(call + Call.V_HEAD_DIM)
    largest, total, offset = load_f32(part), load_f32(part + 4), load_f32(part + 8)
    factor = float_of(load_i64(call + Call.V_FACTOR))
    outer = load_i64(call + Call.V_OUTER)
    if outer:
        factor *= load_f32(outer + 4 * (kv_head if load_i64(call + Call.V_OUTERS) > 1 else 0))
    sinks = load_i64(call + Call.SINKS)
    if sinks:
        sink = load_f32(sinks + 4 * head)
        if sink > largest:
            factor *= exp_of(largest - sink)
            total = total * exp_of(largest - sink) + _ONE
            largest = sink
        else:
            total += exp_of(sink - largest)
    if total == _ZERO:
        factor = _ZERO
    else:
        factor /= total
    halves = load_i64(call + Call.V_HALVES)
    for i in range(head_dim):
        place = i
        if halves:
            start = i - i % 32
            width = 8 if head_dim - start < 32 else 16
            place = start + (i - start) // 2 + width * (i % 2)
        x = load_f32(part + SCALARS + 4 * place) + offset
        store_f32(row + 4 * i, x * factor)
    if load_i64(call + Call.V_ROTATED):
        rotate_in_place(row, head_dim)
    real = load_i64(call + Call.OUT_REAL)
    heads = load_i64(call + Call.KV_HEADS) * load_i64(call + Call.GROUP)
    start = (token * heads + head) * head_dim
    state = load_i64(call + Call.STATE)
    if state:
        state += 8 * (token * heads + head)
        if load_i64(call + Call.FOLD):
            _blend(row, load_i64(call + Call.OUT) + 4 * start, state, largest, total, head_dim)
        else:
            store_f32(state, largest)
            store_f32(state + 4, total)
    if real == Real.FLOAT16:
        out = load_i64(call + Call.OUT) + 2 * start
        for i in range(head_dim):
            store_f16(out + 2 * i, load_f32(row + 4 * i))
    elif real == Real.BFLOAT16:
        out = load_i64(call + Call.OUT) + 2 * start
        for i in range(head_dim):
            store_bf16(out + 2 * i, load_f32(row + 4 * i))
    else:
        out = load_i64(call + Call.OUT) + 4 * start
        for i in range(head_dim):
            store_f32(out + 4 * i, load_f32(row + 4 * i))


@njit(inline="always")
def _aligned(address: int) -> int:
    return (address + _LINE - 1) // _LINE * _LINE


@njit(error_model="numpy")
def _run_item(call: int, item: int, scratch: int) -> None:
    dk, dv, group = (
        load_i64(call + Call.K_HEAD_DIM),
        load_i64(call + Call.V_HEAD_DIM),
        load_i64(call + Call.GROUP),
    )
    heads, page = load_i64(call + Call.KV_HEADS), load_i64(call + Call.PAGE_SIZE)
    softcap = float_of(load_i64(call + Call.SOFTCAP))
    seq, q0, q1 = (
        load_i64(item + Item.SEQ),
        load_i64(item + Item.FIRST_QUERY),
        load_i64(item + Item.END_QUERY),
    )
    h0, h1 = load_i64(item + Item.FIRST_HEAD), load_i64(item + Item.END_HEAD)
    first_split, end_split = load_i64(item + Item.FIRST_SPLIT), load_i64(item + Item.END_SPLIT)
    all_first, all_end = load_i64(item + Item.ALL_FIRST), load_i64(item + Item.ALL_END)
    alone = first_split == all_first and end_split == all_end
    begin = load_i32(load_i64(call + Call.CU_SEQLENS_Q) + 4 * seq)
    queries = load_i32(load_i64(call + Call.CU_SEQLENS_Q) + 4 * (seq + 1)) - begin
    length = load_i32(load_i64(call + Call.SEQLENS_KV) + 4 * seq)
    shift = length - queries  # position of query 0
    table = load_i64(call + Call.PAGE_TABLE) + 4 * seq * load_i64(call + Call.PAGE_TABLE_STRIDE)
    rows = (q1 - q0) * group
    all_rows = rows * (h1 - h0)
    part_bytes = SCALARS + 4 * dv
    k_scaling, v_scaling = load_i64(call + Call.K_SCALING), load_i64(call + Call.V_SCALING)
    k_blocks, v_blocks = dk // 16, dv // 16
    numbers = load_i64(call + Call.E4M3)

    q_rows = scratch
    scores = _aligned(q_rows + 4 * all_rows * dk)
    parts = _aligned(scores + 4 * rows * TILE)
    folded = _aligned(parts + all_rows * part_bytes)
    words = _aligned(folded + all_rows * part_bytes)
    keys = _aligned(words + 4 * dk * TILE)
    values = _aligned(keys + 4 * dk * TILE)
    k_blocks_at = _aligned(values + 4 * dv * TILE)
    v_blocks_at = _aligned(k_blocks_at + 4 * k_blocks * TILE)
    k_scales = _aligned(v_blocks_at + 4 * v_blocks * TILE)
    k_offsets, v_scales = k_scales + 4 * TILE, k_scales + 8 * TILE
    v_offsets, nans = k_scales + 12 * TILE, k_scales + 16 * TILE
    q_sums = k_scales + 20 * TILE
    row = _aligned(q_sums + 4 * all_rows)
    tile = _aligned(row + 4 * dv)
    slots = _aligned(tile + Tile.END)  # where rows begin: codes and scales of keys, then of values
    k_slot_scales, v_slots = slots + _SLOTS_BYTES, slots + 2 * _SLOTS_BYTES
    v_slot_scales = slots + 3 * _SLOTS_BYTES
    page_bytes = load_i64(call + Call.PAGE_STRIDE)
    k_bytes, v_bytes = load_i64(call + Call.K_ROW_BYTES), load_i64(call + Call.V_ROW_BYTES)
    k_scale_bytes = _scale_bytes(k_scaling, k_blocks)
    v_scale_bytes = _scale_bytes(v_scaling, v_blocks)

    for t in range(TILE):
        store_f32(k_scales + 4 * t, _ONE)
        store_f32(v_scales + 4 * t, _ONE)
        store_f32(k_offsets + 4 * t, _ZERO)
        store_f32(v_offsets + 4 * t, _ZERO)
        store_i32(nans + 4 * t, 0)
    for h in range(h0, h1):
        for r in range(rows):
            i = (h - h0) * rows + r
            token, head = begin + q0 + r // group, h * group + r % group
            store_f32(q_sums + 4 * i, _load_query(call, token, head, h, q_rows + 4 * dk * i))
    if alone:
        for i in range(all_rows):
            _clear(folded + i * part_bytes, dv)

    seen_first = _first_seen(call, shift + q0)
    seen_end = _end_seen(call, shift + q1 - 1, length)
    for split in range(first_split, end_split):
        if not alone:
            parts = load_i64(call + Call.PARTS) + part_bytes * (
                load_i64(item + Item.PART) + (split - all_first) * all_rows
            )
        for i in range(all_rows):
            _clear(parts + i * part_bytes, dv)
        start, end = _split_start(split), min(_split_start(split + 1), seen_end)
        low = max(start, seen_first)
        # Tiles with visible keys; other keys in them are read as the nearest visible one.
        first_tile = (low // TILE) * TILE
        padded = (end - first_tile + TILE - 1) // TILE * TILE + TILE
        number, within = low // page, low % page
        page_at = load_i32(table + 4 * number) * page_bytes
        for t in range(padded):
            if low < first_tile + t < end:
                within += 1
                if within == page:
                    number, within = number + 1, 0
                    page_at = load_i32(table + 4 * number) * page_bytes
            row_of_page = within * heads
            store_i64(slots + 8 * t, page_at + row_of_page * k_bytes)
            store_i64(k_slot_scales + 8 * t, page_at + row_of_page * k_scale_bytes)
            store_i64(v_slots + 8 * t, page_at + row_of_page * v_bytes)
            store_i64(v_slot_scales + 8 * t, page_at + row_of_page * v_scale_bytes)
        for key in range(first_tile, end, TILE):
            ahead = 8 * (key - first_tile)
            for h in range(h0, h1):
                first = (h - h0) * rows
                if k_scaling == Scaling.BLOCK:
                    _block_scales(
                        load_i64(call + Call.K_SCALES) + h * k_scale_bytes, k_slot_scales + ahead,
                        k_blocks, numbers, k_blocks_at, 4, 4 * TILE,
                    )  # fmt: skip
                else:
                    _row_scales(
                        load_i64(call + Call.K_SCALES) + h * k_scale_bytes, k_scaling,
                        k_slot_scales + ahead, k_scales, k_offsets,
                    )  # fmt: skip
                store_i64(tile + Tile.BASE, load_i64(call + Call.K_CODES) + h * k_bytes)
                store_i64(tile + Tile.SLOTS, slots + ahead)
                store_i64(tile + Tile.ROW_WORDS, k_bytes // 4)
                store_i64(tile + Tile.HEAD_DIM, dk)
                store_i64(tile + Tile.ROWS, rows)
                store_i64(tile + Tile.IN, q_rows + 4 * dk * first)
                store_i64(tile + Tile.IN_PITCH, 4 * dk)
                store_i64(tile + Tile.OUT, scores)
                store_i64(tile + Tile.WORDS, words)
                store_i64(tile + Tile.EXPANDED, keys)
                store_i64(tile + Tile.BLOCK_SCALES, k_blocks_at)
                store_i64(tile + Tile.NANS, nans)
                run_at(load_i64(call + Call.K_KERNEL), tile, 0)
                broken = False
                for t in range(TILE):
                    if load_i32(nans + 4 * t) != 0:
                        broken = True
                        store_f32(k_scales + 4 * t, _NAN)
                        store_i32(nans + 4 * t, 0)

                if v_scaling == Scaling.BLOCK:
                    _block_scales(
                        load_i64(call + Call.V_SCALES) + h * v_scale_bytes, v_slot_scales + ahead,
                        v_blocks, numbers, v_blocks_at, 4 * v_blocks, 4,
                    )  # fmt: skip
                else:
                    _row_scales(
                        load_i64(call + Call.V_SCALES) + h * v_scale_bytes, v_scaling,
                        v_slot_scales + ahead, v_scales, v_offsets,
                    )  # fmt: skip
                for r in range(rows):
                    position = shift + q0 + r // group
                    seen = max(_first_seen(call, position) - key, 0)
                    unseen = min(_end_seen(call, position, length) - key, end - key, TILE)
                    scores_row = scores + 4 * TILE * r
                    part = parts + (first + r) * part_bytes
                    if seen >= unseen:
                        for t in range(TILE):
                            store_f32(scores_row + 4 * t, _ZERO)
                        continue
                    q_sum = load_f32(q_sums + 4 * (first + r))
                    here = mask_scores(
                        scores_row, k_scales, k_offsets, q_sum, softcap, seen, unseen
                    )
                    before = load_f32(part)
                    # A part counts even if all its scores are NaN.
                    largest = max(before, here, _LOWEST)
                    if largest > before:
                        store_f32(part, largest)
                        if before > _MINUS_INFINITY:
                            kept = exp_of(before - largest)
                            store_f32(part + 4, load_f32(part + 4) * kept)
                            store_f32(part + 8, load_f32(part + 8) * kept)
                            scale_row(part + SCALARS, kept, dv)
                    weights_of(scores_row, largest, v_scales, v_offsets, part + 4)
                if broken:
                    for t in range(TILE):
                        store_f32(k_scales + 4 * t, _ONE)

                store_i64(tile + Tile.BASE, load_i64(call + Call.V_CODES) + h * v_bytes)
                store_i64(tile + Tile.SLOTS, v_slots + ahead)
                store_i64(tile + Tile.HEAD_DIM, dv)
                store_i64(tile + Tile.IN, scores)
                store_i64(tile + Tile.OUT, parts + first * part_bytes + SCALARS)
                store_i64(tile + Tile.OUT_PITCH, part_bytes)
                store_i64(tile + Tile.EXPANDED, values)
                store_i64(tile + Tile.BLOCK_SCALES, v_blocks_at)
                run_at(load_i64(call + Call.V_KERNEL), tile, 0)
        if alone:
            for i in range(all_rows):
                _fold(folded + i * part_bytes, parts + i * part_bytes, dv)

    if not alone:
        # The thread that finishes last joins the parts.
        counter = load_i64(call + Call.COUNTERS) + 8 * load_i64(item + Item.COUNTER)
        mine = end_split - first_split
        if fetch_add(counter, mine) + mine < all_end - all_first:
            return
        base = load_i64(call + Call.PARTS) + part_bytes * load_i64(item + Item.PART)
        for i in range(all_rows):
            _clear(folded + i * part_bytes, dv)
            for split in range(all_end - all_first):
                _fold(folded + i * part_bytes, base + (split * all_rows + i) * part_bytes, dv)
    for h in range(h0, h1):
        for r in range(rows):
            part = folded + ((h - h0) * rows + r) * part_bytes
            _finish(call, part, begin + q0 + r // group, h * group + r % group, h, row)


def _work(call: int, _: int) -> None:
    """Runs on every thread: takes items until none is left."""
    ticket = fetch_add(call + Call.TICKET, 1)
    scratch = load_i64(call + Call.SCRATCH) + ticket * load_i64(call + Call.SCRATCH_STRIDE)
    count, items = load_i64(call + Call.NUM_ITEMS), load_i64(call + Call.ITEMS)
    while True:
        i = fetch_add(call + Call.NEXT, 1)
        if i >= count:
            return
        _run_item(call, items + i * Item.END, scratch)


def _attend(call: int, worker: int, parallel: int, threads: int) -> int:
    """Splits one step's work into items and runs them; returns the number of threads used.

    parallel: address of GOMP_parallel(function, data, threads, flags), or 0 to use this thread only.
    """
    lengths, offsets = load_i64(call + Call.SEQLENS_KV), load_i64(call + Call.CU_SEQLENS_Q)
    heads, group = load_i64(call + Call.KV_HEADS), load_i64(call + Call.GROUP)
    folds = load_i64(call + Call.FOLD)
    dk, dv = load_i64(call + Call.K_HEAD_DIM), load_i64(call + Call.V_HEAD_DIM)
    per_tile = max(1, QUERY_ROWS // group)
    sequences = load_i64(call + Call.NUM_SEQS)
    row_bytes = heads * group * dv * (4 if load_i64(call + Call.OUT_REAL) == 0 else 2)

    items = np.empty(0, np.int64)
    count, parts, counters, work = 0, 0, 0, 0
    for fill in range(2):
        count, parts, counters, work = 0, 0, 0, 0
        for seq in range(sequences):
            begin, end = load_i32(offsets + 4 * seq), load_i32(offsets + 4 * (seq + 1))
            length = load_i32(lengths + 4 * seq)
            queries = end - begin
            if queries <= 0 or length <= 0:
                if fill and not folds:
                    _zero(load_i64(call + Call.OUT) + begin * row_bytes, queries * row_bytes)
                continue
            tiles = (queries + per_tile - 1) // per_tile
            for reversed_tile in range(tiles):
                q0 = (tiles - 1 - reversed_tile) * per_tile  # long items first
                q1 = min(queries, q0 + per_tile)
                rows = (q1 - q0) * group
                low = _first_seen(call, length - queries + q0)
                high = _end_seen(call, length - queries + q1 - 1, length)
                if high <= low:
                    if fill and not folds:
                        _zero(
                            load_i64(call + Call.OUT) + (begin + q0) * row_bytes,
                            (q1 - q0) * row_bytes,
                        )
                    continue
                work += (high - low) * rows * heads * (dk + dv)
                first, last = _split_of(low), _split_of(high - 1) + 1
                at_once = max(1, min(heads, HEAD_ROWS // rows))
                for h0 in range(0, heads, at_once):
                    h1 = min(heads, h0 + at_once)
                    step = last - first if tiles > 1 else 1
                    for split in range(first, last, step):
                        if fill:
                            at = count * Item.END // 8
                            items[at + Item.SEQ // 8] = seq
                            items[at + Item.FIRST_QUERY // 8] = q0
                            items[at + Item.END_QUERY // 8] = q1
                            items[at + Item.FIRST_HEAD // 8] = h0
                            items[at + Item.END_HEAD // 8] = h1
                            items[at + Item.FIRST_SPLIT // 8] = split
                            items[at + Item.END_SPLIT // 8] = split + step
                            items[at + Item.ALL_FIRST // 8] = first
                            items[at + Item.ALL_END // 8] = last
                            items[at + Item.PART // 8] = parts
                            items[at + Item.COUNTER // 8] = counters
                        count += 1
                    if step < last - first:
                        parts += (last - first) * rows * (h1 - h0)
                        counters += 1
        if not fill:
            items = np.empty(count * Item.END // 8, np.int64)
    used = load_i32(offsets + 4 * sequences) if sequences > 0 else 0
    tokens = load_i64(call + Call.TOKENS)
    if not folds:
        _zero(load_i64(call + Call.OUT) + used * row_bytes, (tokens - used) * row_bytes)
    if count == 0:
        return 0
    room = np.empty(parts * (SCALARS + 4 * dv) + _LINE, np.uint8)
    finished = np.zeros(counters + 1, np.int64)
    store_i64(call + Call.ITEMS, items.ctypes.data)
    store_i64(call + Call.NUM_ITEMS, count)
    store_i64(call + Call.PARTS, _aligned(room.ctypes.data))
    store_i64(call + Call.COUNTERS, finished.ctypes.data)
    store_i64(call + Call.NEXT, 0)
    store_i64(call + Call.TICKET, 0)
    threads = min(threads, count)
    if work < WORTH_A_THREAD or parallel == 0 or threads == 1:
        threads = 1
        run_at(worker, call, 0)
    else:
        fork(parallel, worker, call, threads)
    # The arrays must outlive the work.
    return threads + 0 * (items.size + room.size + finished.size)


def worker_address() -> int:
    """Returns the address of the compiled function that every thread runs."""
    return compiled_worker(_work)


def attend_function() -> Entry:
    """Returns `_attend`, compiled."""
    return compiled_entry(_attend)
