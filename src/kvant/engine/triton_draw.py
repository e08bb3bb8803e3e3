"""Drawing from rows of logits on a GPU: nothing is sorted, nobody waits, and no row sees another.

A row is cut into stretches, one program each. What a filter keeps is everything above an edge, a number,
and the first few of what equals it. The edge is searched for: a pass adds up what lies at or above 16
numbers between its bounds, which brings them 16 times closer; float32 has 2**32 numbers, so 8 passes find
it. Sums over stretches run in one order, so a row's token depends on nothing beside it.

The filters weigh in float32, in sums of a few numbers; what they leave is weighed in float64. Logits in
float64 are rounded to float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_STRETCH = 4096
_CHUNK = 256
_WARPS = 4
_PASSES = 8


@dataclass(frozen=True, slots=True)
class Space:
    """Working memory of `most` rows.

    state: [2, 4, most] float64, the search by count and the one by share: its bounds (as ordered
    integers), what lies at or above the higher one, and the goal. parts: of a pass. sums, ties: of the
    last one. arrived: zeros between launches.
    """

    state: Tensor
    parts: Tensor
    sums: Tensor
    ties: Tensor
    arrived: Tensor


def make_space(most: int, vocab_size: int, device: torch.device) -> Space:
    stretches = triton.cdiv(vocab_size, _STRETCH)
    return Space(
        torch.zeros(2, 4, most, dtype=torch.float64, device=device),
        torch.zeros(most, stretches, 16, device=device),
        torch.zeros(most, stretches, dtype=torch.float64, device=device),
        torch.zeros(most, stretches, dtype=torch.int32, device=device),
        torch.zeros(most, dtype=torch.int32, device=device),
    )


def narrow(
    logits: Tensor, rows: Tensor, numbers: Tensor, tokens: Tensor, space: Space, *, by_share: bool
) -> None:
    """Find the edge of top_k or, after that, the one of top_p, of those rows that have such a filter.

    logits: [.., vocab] float32 or float64. rows: [n] int64. numbers: [n, 5] float64, as `Draw.numbers`.
    tokens: [n] int64, the likeliest of each row.
    """
    count, stretches = len(rows), space.sums.shape[1]
    for place in range(_PASSES):
        _narrow[(count, stretches)](
            logits, logits.stride(0), logits.shape[1], rows, numbers, tokens, space.state,
            space.state.shape[2], space.parts, space.arrived, stretches, BY_SHARE=int(by_share),
            FIRST=place == 0, STRETCH=_STRETCH, CHUNK=_CHUNK,
            PAD=triton.next_power_of_2(stretches), num_warps=_WARPS,
        )  # fmt: skip


def choose(logits: Tensor, rows: Tensor, numbers: Tensor, tokens: Tensor, space: Space) -> None:
    """Put a drawn token into the place of the likeliest one, in rows that have a temperature.

    Of what the filters keep it is the one in which the share u of all weights falls, in the order of
    ids. Rows whose largest is no finite number keep what they have.
    """
    count, stretches = len(rows), space.sums.shape[1]
    given = (
        logits, logits.stride(0), logits.shape[1], rows, numbers, tokens, space.state,
        space.state.shape[2], space.sums, space.ties, stretches,
    )  # fmt: skip
    _weigh[(count, stretches)](*given, STRETCH=_STRETCH, num_warps=_WARPS)
    pad = triton.next_power_of_2(stretches)
    _choose[(count,)](*given, STRETCH=_STRETCH, PAD=pad, num_warps=_WARPS)


def draw_once(logits: Tensor) -> None:
    """Launch every kernel that draws, on one row of logits [.., vocab]: they are compiled."""
    space = make_space(1, logits.shape[1], logits.device)
    numbers = torch.tensor([[1.0, 50.0, 0.9, 0.0, 0.5]], dtype=torch.float64, device=logits.device)
    tokens = torch.zeros(1, dtype=torch.int64, device=logits.device)
    given = logits, torch.zeros_like(tokens), numbers, tokens, space
    narrow(*given, by_share=False)
    narrow(*given, by_share=True)
    choose(*given)


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Float32 as int32 in the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(ordered):  # type: ignore[no-untyped-def]
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _roughly(x, best, temperature):  # type: ignore[no-untyped-def]
    """The weight of x in float32, 1 for the best."""
    heat = tl.minimum(tl.maximum(temperature, 1e-30), 3e38).to(tl.float32)
    return tl.exp((x - best) / heat)


@triton.jit
def _weight(x, best, temperature):  # type: ignore[no-untyped-def]
    return tl.exp((x.to(tl.float64) - best.to(tl.float64)) / temperature)


@triton.jit
def _least(best, temperature, min_p):  # type: ignore[no-untyped-def]
    """The smallest logit that min_p leaves."""
    least = best.to(tl.float64) + temperature * tl.log(tl.maximum(min_p, 1e-300))
    return tl.where(min_p > 0.0, least, float("-inf"))


@triton.jit
def _row_of(logits, stride, rows, numbers, tokens, program):  # type: ignore[no-untyped-def]
    """A program's row, its largest logit, its temperature, and whether its token is drawn."""
    row = logits + tl.load(rows + program).to(tl.int64) * stride
    best = tl.load(row + tl.load(tokens + program)).to(tl.float32)
    temperature = tl.load(numbers + program * 5)
    return (
        row,
        best,
        temperature,
        (temperature > 0.0) & (best > float("-inf")) & (best < float("inf")),
    )


@triton.jit
def _edge(state, most, program, best, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
    """What the filters found: the edge, as an ordered integer, and how many of its equals are kept."""
    has_k = top_k < float("inf")
    has_p = top_p < 1.0
    own = state + program
    edge = tl.load(own, mask=has_k, other=-2147483648.0)
    equals = tl.load(own + 3 * most, mask=has_k, other=0.0) - tl.load(
        own + 2 * most, mask=has_k, other=0.0
    )
    own += 4 * most
    by_share = tl.load(own, mask=has_p, other=0.0)
    left = tl.load(own + 3 * most, mask=has_p, other=0.0) - tl.load(
        own + 2 * most, mask=has_p, other=0.0
    )
    weight = _roughly(_number(by_share.to(tl.int64).to(tl.int32)), best, temperature)
    needed = tl.maximum(tl.ceil(left / tl.maximum(weight.to(tl.float64), 1e-300)), 1.0)
    needed = tl.where(by_share == edge, tl.minimum(needed, equals), needed)
    edge = tl.where(has_p, by_share, edge)
    return edge.to(tl.int64).to(tl.int32), tl.where(has_p, needed, equals)


@triton.jit(do_not_specialize=("stride", "size", "most", "stretches"))
def _narrow(logits, stride, size, rows, numbers, tokens, state, most, parts, arrived, stretches,
            BY_SHARE: tl.constexpr, FIRST: tl.constexpr, STRETCH: tl.constexpr,
            CHUNK: tl.constexpr, PAD: tl.constexpr):  # fmt: skip
    """Program: a stretch of a row; the last one of a row to end brings the bounds closer.

    What lies at or above the lower bound reaches the goal, what lies at or above the higher does not.
    """
    program = tl.program_id(0)
    stretch = tl.program_id(1)
    row, best, temperature, wanted = _row_of(logits, stride, rows, numbers, tokens, program)
    top_k = tl.load(numbers + program * 5 + 1)
    top_p = tl.load(numbers + program * 5 + 2)
    least = _least(best, temperature, tl.load(numbers + program * 5 + 3))
    own = state + BY_SHARE * 4 * most + program
    # Of the equals of top_k's edge some may be left out: they are added up apart.
    edge = tl.full((), -2147483648, tl.int64)
    equals = tl.full((), 0.0, tl.float64)
    if BY_SHARE:
        wanted = wanted & (top_p < 1.0)
        has_k = wanted & (top_k < float("inf"))
        first = state + program
        edge = tl.load(first, mask=has_k, other=-2147483648.0).to(tl.int64)
        equals = tl.load(first + 3 * most, mask=has_k, other=0.0) - tl.load(
            first + 2 * most, mask=has_k, other=0.0
        )
    else:
        wanted = wanted & (top_k < float("inf"))
    if FIRST:
        low = edge
        high = _ordered(best).to(tl.int64) + 1
    else:
        low = tl.load(own, mask=wanted, other=0.0).to(tl.int64)
        high = tl.load(own + most, mask=wanted, other=0.0).to(tl.int64)
        wanted = wanted & (high - low > 1)
    if wanted:
        j = tl.arange(0, 16)
        marks = low + (high - low) * j // 16
        c = tl.arange(0, CHUNK)
        sums = tl.zeros((CHUNK, 16), tl.float32)
        end = tl.minimum(size, (stretch + 1) * STRETCH)
        ids = stretch * STRETCH + c
        x = tl.load(row + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
        for _ in range(0, STRETCH, CHUNK):
            following = tl.load(row + ids + CHUNK, mask=ids + CHUNK < end, other=float("-inf"))
            place = _ordered(x)
            if BY_SHARE:
                weights = _roughly(x, best, temperature)
                weights = tl.where(place == edge.to(tl.int32), 0.0, weights)
            else:
                weights = tl.full((CHUNK,), 1.0, tl.float32)
            weights = tl.where((ids < end) & (x.to(tl.float64) >= least), weights, 0.0)
            reaches = place[:, None] >= marks.to(tl.int32)[None, :]
            sums += tl.where(reaches, weights[:, None], 0.0)
            x = following.to(tl.float32)
            ids += CHUNK
        tl.store(parts + (program * stretches + stretch) * 16 + j, tl.sum(sums, 0))
        tl.debug_barrier()
        before = tl.atomic_add(arrived + program, 1, sem="acq_rel")
        if before == stretches - 1:
            s = tl.arange(0, PAD)[:, None]
            found = tl.load(parts + (program * stretches + s) * 16 + j[None, :],
                            mask=s < stretches, other=0.0, cache_modifier=".cg")  # fmt: skip
            found = tl.sum(found.to(tl.float64), 0)
            if BY_SHARE:
                of_one = _roughly(_number(edge.to(tl.int32)), best, temperature).to(tl.float64)
                kept = tl.where(equals > 0.0, equals * of_one, 0.0)
                found += tl.where(marks == edge, kept, 0.0)
            if FIRST:
                # At or above the lowest mark lies everything.
                wished = (
                    top_p * tl.max(found, 0) if BY_SHARE else tl.minimum(top_k, tl.max(found, 0))
                )
                beyond = tl.full((), 0.0, tl.float64)
            else:
                wished = tl.load(own + 3 * most)
                beyond = tl.load(own + 2 * most)
            enough = found >= wished
            tl.store(own, tl.max(tl.where(enough, marks, low), 0).to(tl.float64))
            tl.store(own + most, tl.min(tl.where(enough, high, marks), 0).to(tl.float64))
            tl.store(own + 2 * most, tl.max(tl.where(enough, beyond, found), 0))
            tl.store(own + 3 * most, wished)
            tl.store(arrived + program, 0)


@triton.jit(do_not_specialize=("stride", "size", "most", "stretches"))
def _weigh(logits, stride, size, rows, numbers, tokens, state, most, sums, ties, stretches,
           STRETCH: tl.constexpr):  # fmt: skip
    """Program: a stretch of a row; what lies above the edge there, and how many equal it."""
    program = tl.program_id(0)
    stretch = tl.program_id(1)
    row, best, temperature, is_drawn = _row_of(logits, stride, rows, numbers, tokens, program)
    if is_drawn:
        top_k = tl.load(numbers + program * 5 + 1)
        top_p = tl.load(numbers + program * 5 + 2)
        edge, _ = _edge(state, most, program, best, temperature, top_k, top_p)
        ids = stretch * STRETCH + tl.arange(0, STRETCH)
        x = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        least = _least(best, temperature, tl.load(numbers + program * 5 + 3))
        there = (ids < size) & (x.to(tl.float64) >= least)
        place = _ordered(x)
        weights = tl.where(there & (place > edge), _weight(x, best, temperature), 0.0)
        tl.store(sums + program * stretches + stretch, tl.sum(weights, 0))
        equal = (there & (place == edge)).to(tl.int32)
        tl.store(ties + program * stretches + stretch, tl.sum(equal, 0))


@triton.jit(do_not_specialize=("stride", "size", "most", "stretches"))
def _choose(logits, stride, size, rows, numbers, tokens, state, most, sums, ties, stretches,
            STRETCH: tl.constexpr, PAD: tl.constexpr):  # fmt: skip
    """Program: a row. The stretch in which the share falls, then the token."""
    program = tl.program_id(0)
    row, best, temperature, is_drawn = _row_of(logits, stride, rows, numbers, tokens, program)
    if is_drawn:
        top_k = tl.load(numbers + program * 5 + 1)
        top_p = tl.load(numbers + program * 5 + 2)
        edge, equals = _edge(state, most, program, best, temperature, top_k, top_p)
        s = tl.arange(0, PAD)
        at = program * stretches + s
        above = tl.load(sums + at, mask=s < stretches, other=0.0)
        equal = tl.load(ties + at, mask=s < stretches, other=0)
        earlier = tl.cumsum(equal, 0) - equal
        kept = tl.minimum(tl.maximum(equals - earlier, 0.0), equal.to(tl.float64))
        of_one = tl.where(equals > 0.0, _weight(_number(edge), best, temperature), 0.0)
        whole = above + kept * of_one
        ends = tl.cumsum(whole, 0)
        wished = tl.load(numbers + program * 5 + 4) * tl.max(ends, 0)
        # The first stretch whose end is beyond the share, or the last with weight.
        last = tl.max(tl.where(whole > 0.0, s, 0), 0)
        stretch = tl.minimum(tl.sum((ends <= wished).to(tl.int32), 0), last)
        before = tl.max(tl.where(s < stretch, ends, 0.0), 0)
        kept_here = tl.sum(tl.where(s == stretch, kept, 0.0), 0)
        c = tl.arange(0, STRETCH)
        ids = stretch * STRETCH + c
        x = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        least = _least(best, temperature, tl.load(numbers + program * 5 + 3))
        there = (ids < size) & (x.to(tl.float64) >= least)
        place = _ordered(x)
        is_equal = there & (place == edge)
        is_kept = is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= kept_here)
        is_kept = is_kept | (there & (place > edge))
        weights = tl.where(is_kept, _weight(x, best, temperature), 0.0)
        passed = tl.sum((before + tl.cumsum(weights, 0) <= wished).to(tl.int32), 0)
        furthest = tl.max(tl.where(weights > 0.0, c, 0), 0)
        token = stretch * STRETCH + tl.minimum(passed, furthest)
        tl.store(tokens + program, token.to(tl.int64))
