"""The work map: which program computes which item. Every program derives it from the lengths.

Sequences are split into items: a block of query rows times a range of keys. Ranges have the length that
gives about `target` items in the whole batch, so one long sequence among short ones is spread over the
device. The map depends only on data on the device: the grid is a bound, programs past the last item
return, and a captured graph stays right when lengths change. Every program scans the lengths itself,
128 at a time; for 128 this costs less than the dependent loads of a map in memory. With more
sequences, separate kernels write the map once per step, and all layers that are cut alike
share it.
"""

from __future__ import annotations

import triton
import triton.language as tl

TRIALS = tl.constexpr(4)


@triton.jit
def _sequences(first, cu_seqlens_q, seqlens_kv, num_seqs, window,
               GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
               CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """For LANES sequences from `first`: row blocks, and the longest span of one in key tiles.

    LANES: 128, or 1 for a sequence alone, whose sums need no other threads.
    """
    i = first + tl.arange(0, LANES)
    there = i < num_seqs
    n = tl.load(cu_seqlens_q + i + 1, mask=there, other=0)
    n -= tl.load(cu_seqlens_q + i, mask=there, other=0)
    span = tl.load(seqlens_kv + i, mask=there, other=0)
    if WINDOW:
        reach = n + window if CAUSAL else n + 2 * window
        span = tl.minimum(span, reach + TILE)
    return tl.cdiv(n * GROUP, ROWS), tl.maximum(tl.cdiv(span, TILE), 1)


@triton.jit
def splits_of(tiles, per_split):
    return tl.cdiv(tiles, per_split)


@triton.jit
def tiles_per_split(cu_seqlens_q, seqlens_kv, num_seqs, window, target, least,
                    GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
                    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEARCH: tl.constexpr,
                    LANES: tl.constexpr = 128):  # fmt: skip
    """Key tiles in one item: `least`, or more if the batch would make more than `target` items
    besides one for each row block.

    SEARCH: the fewest tiles that a handful of trials finds, because the step waits for the longest
    item. Otherwise a number that suffices for any lengths.
    """
    total = 0
    row_blocks = 0
    for first in range(0, num_seqs, LANES):
        blocks, tiles = _sequences(first, cu_seqlens_q, seqlens_kv, num_seqs, window,
                                   GROUP, ROWS, TILE, CAUSAL, WINDOW, LANES)  # fmt: skip
        total += tl.sum(blocks * tiles, 0)
        row_blocks += tl.sum(blocks, 0)
    per_split = tl.maximum(tl.cdiv(total, target), least)
    if SEARCH:
        fewest = tl.maximum(tl.cdiv(total, target + row_blocks), least)
        if fewest < per_split:
            eighths = (1 << tl.arange(0, TRIALS)) >> 1
            trial = fewest + (per_split - fewest) * eighths // 8
            items = tl.zeros((TRIALS,), tl.int32)
            for first in range(0, num_seqs, LANES):
                blocks, tiles = _sequences(first, cu_seqlens_q, seqlens_kv, num_seqs, window,
                                           GROUP, ROWS, TILE, CAUSAL, WINDOW, LANES)  # fmt: skip
                items += tl.sum(blocks[:, None] * tl.cdiv(tiles[:, None], trial[None, :]), 0)
            fits = items <= target + row_blocks
            per_split = tl.min(tl.where(fits, trial, per_split), 0)
    return per_split


@triton.jit
def find_item(item, per_split, cu_seqlens_q, seqlens_kv, num_seqs, window,
              GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
              CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LANES: tl.constexpr = 128):  # fmt: skip
    """(sequence or -1, its first item, its splits) of an item."""
    seq = -1
    start = 0
    splits = 1
    base = 0
    for first in range(0, num_seqs, LANES):
        blocks, tiles = _sequences(first, cu_seqlens_q, seqlens_kv, num_seqs, window,
                                   GROUP, ROWS, TILE, CAUSAL, WINDOW, LANES)  # fmt: skip
        parts = splits_of(tiles, per_split)
        items = blocks * parts
        end = base + tl.cumsum(items, 0)
        here = (item < end) & (item >= end - items)
        if tl.max(here.to(tl.int32), 0) > 0:
            lane = tl.arange(0, LANES)
            seq = first + tl.sum(tl.where(here, lane, 0), 0)
            start = tl.sum(tl.where(here, end - items, 0), 0)
            splits = tl.sum(tl.where(here, parts, 0), 0)
        base += tl.sum(items, 0)
    return seq, start, splits


@triton.jit
def find_token(token, per_split, cu_seqlens_q, seqlens_kv, num_seqs, window,
               GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
               CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LANES: tl.constexpr = 128):  # fmt: skip
    """(sequence or -1, its first item, its splits) of a query token."""
    seq = -1
    start = 0
    splits = 1
    base = 0
    for first in range(0, num_seqs, LANES):
        blocks, tiles = _sequences(first, cu_seqlens_q, seqlens_kv, num_seqs, window,
                                   GROUP, ROWS, TILE, CAUSAL, WINDOW, LANES)  # fmt: skip
        parts = splits_of(tiles, per_split)
        items = blocks * parts
        lane = tl.arange(0, LANES)
        i = first + lane
        there = i < num_seqs
        lo = tl.load(cu_seqlens_q + i, mask=there, other=0)
        hi = tl.load(cu_seqlens_q + i + 1, mask=there, other=0)
        here = (token >= lo) & (token < hi)
        if tl.max(here.to(tl.int32), 0) > 0:
            seq = first + tl.sum(tl.where(here, lane, 0), 0)
            start = base + tl.sum(tl.where(here, tl.cumsum(items, 0) - items, 0), 0)
            splits = tl.sum(tl.where(here, parts, 0), 0)
        base += tl.sum(items, 0)
    return seq, start, splits


@triton.jit(do_not_specialize=("num_seqs", "window", "target", "least"))
def list_items(
    found, cu_seqlens_q, seqlens_kv, num_seqs, window, target, least,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FIXED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program: one item, or one query token if TOKENS. found: [programs, 4] int32, sequence (-1 for
    none), its first item, its splits.
    """
    program = tl.program_id(0)
    if FIXED:
        per_split = least
    else:
        per_split = tiles_per_split(cu_seqlens_q, seqlens_kv, num_seqs, window, target, least,
                                    GROUP, ROWS, TILE, CAUSAL, WINDOW, True)  # fmt: skip
    if TOKENS:
        seq, first, splits = find_token(program, per_split, cu_seqlens_q, seqlens_kv, num_seqs, window,
                                        GROUP, ROWS, TILE, CAUSAL, WINDOW and not FIXED)  # fmt: skip
    else:
        seq, first, splits = find_item(program, per_split, cu_seqlens_q, seqlens_kv, num_seqs, window,
                                       GROUP, ROWS, TILE, CAUSAL, WINDOW and not FIXED)  # fmt: skip
    tl.store(found + 4 * program, seq)
    tl.store(found + 4 * program + 1, first)
    tl.store(found + 4 * program + 2, splits)


@triton.jit
def listed(found, place):
    """Returns (sequence or -1, its first item, its splits) of an item or a token, from `list_items`."""
    return (
        tl.load(found + 4 * place),
        tl.load(found + 4 * place + 1),
        tl.load(found + 4 * place + 2),
    )
