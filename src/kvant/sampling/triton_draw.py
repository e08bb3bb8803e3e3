"""Samples from rows of logits on a GPU, without sorting or waiting, each row by itself.

`kvant.sampling.triton_few` samples most rows. The kernels here sample the others. A row is cut into
stretches. A filter keeps all logits above a threshold, the edge, and the first few that equal it. The edge
is found by search: each pass sums the weights at or above 16 numbers between two bounds, which brings the
bounds 16 times closer. float32 has 2**32 values, so 8 passes suffice, and fewer if no two logits lie close
to the edge. Stretches are summed in a fixed order, so a row's token does not depend on other rows.

The search sums weights in float32, few at a time. The kept tokens' weights are in float64.

Kernels are not specialized on `tokens`: a graph of one row has them at an odd address, and every kernel
would be compiled once more for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvant.sampling.triton_few import draw_few, survey
from kvant.sampling.triton_row import least, number, ordered, roughly, row_of, weight

_STRETCH = 4096
_WARPS = 4
_PASSES = 8
_PROGRAMS = 2048
"""Launches with more programs give each one several stretches, which is cheaper for rows without work."""

_GROUP = 32
_HELD = 4096
_LARGEST_K = 1024
_FEW_WARPS = 8


@dataclass(frozen=True, slots=True)
class Space:
    """Working memory for up to `most` rows.

    state: [2, 4, most] float64, the searches by count (top_k) and by share (top_p): lower and upper bound
    (as places, see `ordered`), the sum at or above the upper bound, and the goal. parts: partial sums of a
    pass. sums, ties: weights above the edge and logits equal to it, by stretch; `survey` uses sums too.
    arrived: counters, zero between launches. peaks: [most, groups], each group's largest logit. listed:
    groups that are read again. held, held_ids: logits found there and their ids. drawn: 1 if they sufficed.
    """

    state: Tensor
    parts: Tensor
    sums: Tensor
    ties: Tensor
    arrived: Tensor
    peaks: Tensor
    listed: Tensor
    held: Tensor
    held_ids: Tensor
    drawn: Tensor


def make_space(most: int, vocab_size: int, device: torch.device) -> Space:
    stretches = triton.cdiv(vocab_size, _STRETCH)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(most, *shape, dtype=dtype, device=device)

    return Space(
        torch.empty(2, 4, most, dtype=torch.float64, device=device),
        empty(stretches, 16),
        empty(stretches, dtype=torch.float64),
        empty(stretches, dtype=torch.int32),
        torch.zeros(most, dtype=torch.int32, device=device),
        empty(triton.cdiv(vocab_size, _GROUP)),
        empty(2 * _LARGEST_K, dtype=torch.int32),
        empty(_HELD),
        empty(_HELD, dtype=torch.int32),
        empty(dtype=torch.int32),
    )


def draw_from_few(
    logits: Tensor, rows: Tensor, numbers: Tensor, tokens: Tensor, space: Space
) -> None:
    """Samples the rows in which top_k or top_p keeps few tokens; always succeeds for top_k up to `FEW`.

    logits: [.., vocab] float32 or float64. rows: [n] int64. numbers: [n, 5] float64, as `Draw.numbers`.
    tokens: [n] int64, each row's likeliest token, overwritten with the sampled one. Must run before `narrow`,
    which handles the remaining rows.
    """
    count, stretches = len(rows), space.sums.shape[1]
    groups, per = space.peaks.shape[1], _stretches_of_a_program(count, stretches)
    given = logits, logits.stride(0), logits.shape[1], rows, numbers, tokens
    survey[(count, triton.cdiv(stretches, per))](
        *given, space.peaks, space.sums, groups, stretches, per, STRETCH=_STRETCH, GROUP=_GROUP,
        LARGEST_K=_LARGEST_K, num_warps=_WARPS,
    )  # fmt: skip
    draw_few[(count,)](
        *given, space.peaks, space.sums, space.listed, space.held, space.held_ids, space.drawn,
        groups, stretches, GROUP=_GROUP, PEAKS=triton.next_power_of_2(groups),
        SUMS=triton.next_power_of_2(stretches), LISTED=space.listed.shape[1],
        HELD=_HELD, LARGEST_K=_LARGEST_K, num_warps=_FEW_WARPS,
    )  # fmt: skip


def narrow(
    logits: Tensor, rows: Tensor, numbers: Tensor, tokens: Tensor, space: Space, *, by_share: bool
) -> None:
    """Finds the edge of top_k or, with by_share, of top_p in rows that `draw_from_few` did not sample.

    logits: [.., vocab]. Other arguments: as in `draw_from_few`. The result is in `space.state`. top_k comes
    before top_p.
    """
    count, stretches = len(rows), space.sums.shape[1]
    per = _stretches_of_a_program(count, stretches)
    for place in range(_PASSES):
        _narrow[(count, triton.cdiv(stretches, per))](
            logits, logits.stride(0), logits.shape[1], rows, numbers, tokens, space.state,
            space.state.shape[2], space.parts, space.arrived, space.drawn, stretches, per,
            BY_SHARE=int(by_share), FIRST=place == 0, STRETCH=_STRETCH,
            PAD=triton.next_power_of_2(stretches), num_warps=_WARPS,
        )  # fmt: skip


def choose(logits: Tensor, rows: Tensor, numbers: Tensor, tokens: Tensor, space: Space) -> None:
    """Samples the rows that `draw_from_few` did not sample; overwrites their entries of tokens [n].

    The tokens that the filters keep are ordered by id. The sampled token is the first one whose cumulative
    weight exceeds u times the total. Rows with temperature 0, or whose largest logit is not finite, keep
    their tokens.
    """
    count, stretches = len(rows), space.sums.shape[1]
    per = _stretches_of_a_program(count, stretches)
    given = (
        logits, logits.stride(0), logits.shape[1], rows, numbers, tokens, space.state,
        space.state.shape[2], space.sums, space.ties, space.drawn, stretches,
    )  # fmt: skip
    _weigh[(count, triton.cdiv(stretches, per))](*given, per, STRETCH=_STRETCH, num_warps=_WARPS)
    pad = triton.next_power_of_2(stretches)
    _choose[(count,)](*given, STRETCH=_STRETCH, PAD=pad, num_warps=_WARPS)


def draw_once(logits: Tensor) -> None:
    """Launches every sampling kernel on one row of logits [.., vocab], so that all are compiled."""
    space = make_space(1, logits.shape[1], logits.device)
    numbers = torch.tensor([[1.0, 50.0, 0.9, 0.0, 0.5]], dtype=torch.float64, device=logits.device)
    tokens = torch.zeros(1, dtype=torch.int64, device=logits.device)
    given = logits, torch.zeros_like(tokens), numbers, tokens, space
    draw_from_few(*given)
    narrow(*given, by_share=False)
    narrow(*given, by_share=True)
    choose(*given)


def _stretches_of_a_program(count: int, stretches: int) -> int:
    return max(1, min(stretches, count * stretches // _PROGRAMS))


@triton.jit
def _is_open(drawn, program, top_k, top_p):  # type: ignore[no-untyped-def]
    """Returns whether a row is still to be sampled: it has no filters, or `draw_few` did not sample it."""
    is_filtered = (top_k < float("inf")) | (top_p < 1.0)
    return tl.load(drawn + program, mask=is_filtered, other=0) == 0


@triton.jit
def _edge(state, most, program, best, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
    """Returns the edge that the searches found, as a place, and how many logits equal to it are kept."""
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
    weight = roughly(number(by_share.to(tl.int64).to(tl.int32)), best, temperature)
    needed = tl.maximum(tl.ceil(left / tl.maximum(weight.to(tl.float64), 1e-300)), 1.0)
    needed = tl.where(left > 0.0, needed, 0.0)
    needed = tl.where(by_share == edge, tl.minimum(needed, equals), needed)
    edge = tl.where(has_p, by_share, edge)
    return edge.to(tl.int64).to(tl.int32), tl.where(has_p, needed, equals)


@triton.jit(do_not_specialize=("tokens", "most", "stretches", "per"))
def _narrow(logits, stride, size, rows, numbers, tokens, state, most, parts, arrived, drawn,
            stretches, per, BY_SHARE: tl.constexpr, FIRST: tl.constexpr, STRETCH: tl.constexpr,
            PAD: tl.constexpr):  # fmt: skip
    """One program per `per` stretches of a row; the row's last program to finish narrows the bounds.

    The sum at or above the lower bound reaches the goal; the sum at or above the upper bound does not.
    """
    program = tl.program_id(0)
    row, best, temperature, wanted = row_of(logits, stride, rows, numbers, tokens, program)
    top_k = tl.load(numbers + program * 5 + 1)
    top_p = tl.load(numbers + program * 5 + 2)
    bound = least(best, temperature, tl.load(numbers + program * 5 + 3))
    wanted = wanted & _is_open(drawn, program, top_k, top_p)
    own = state + BY_SHARE * 4 * most + program
    # top_k may drop some logits that equal its edge, so these are summed separately.
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
        high = ordered(best).to(tl.int64) + 1
    else:
        low = tl.load(own, mask=wanted, other=0.0).to(tl.int64)
        high = tl.load(own + most, mask=wanted, other=0.0).to(tl.int64)
        wanted = wanted & (high - low > 1)
    if wanted:
        begin = tl.program_id(1) * per
        end = tl.minimum(begin + per, stretches)
        for stretch in range(begin, end):
            ids = stretch * STRETCH + tl.arange(0, STRETCH)
            x = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
            if BY_SHARE:
                weights = roughly(x, best, temperature)
                weights = tl.where(x == number(edge.to(tl.int32)), 0.0, weights)
            else:
                weights = tl.full((STRETCH,), 1.0, tl.float32)
            weights = tl.where((ids < size) & (x >= bound), weights, 0.0)
            part = parts + (program * stretches + stretch) * 16
            for j in tl.static_range(16):
                mark = number((low + (high - low) * j // 16).to(tl.int32))
                tl.store(part + j, tl.sum(tl.where(x >= mark, 1.0, 0.0) * weights, 0))
        tl.debug_barrier()
        before = tl.atomic_add(arrived + program, end - begin, sem="acq_rel")
        if before + end - begin == stretches:
            j = tl.arange(0, 16)
            marks = low + (high - low) * j // 16
            s = tl.arange(0, PAD)[:, None]
            found = tl.load(parts + (program * stretches + s) * 16 + j[None, :],
                            mask=s < stretches, other=0.0, cache_modifier=".cg")  # fmt: skip
            found = tl.sum(found.to(tl.float64), 0)
            if BY_SHARE:
                of_equals = roughly(number(edge.to(tl.int32)), best, temperature).to(tl.float64)
                kept = tl.where(equals > 0.0, equals * of_equals, 0.0)
                found += tl.where(marks == edge, kept, 0.0)
            if FIRST:
                # The sum at or above the lowest mark is the total.
                wished = (
                    top_p * tl.max(found, 0) if BY_SHARE else tl.minimum(top_k, tl.max(found, 0))
                )
                beyond = tl.full((), 0.0, tl.float64)
            else:
                wished = tl.load(own + 3 * most)
                beyond = tl.load(own + 2 * most)
            enough = found >= wished
            low = tl.max(tl.where(enough, marks, low), 0)
            high = tl.min(tl.where(enough, high, marks), 0)
            beyond = tl.max(tl.where(enough, beyond, found), 0)
            reached = tl.min(tl.where(enough, found, float("inf")), 0)
            # If one logit is left between the bounds, the search ends: everything below it is dropped.
            of_one = tl.full((), 1.0, tl.float64)
            if BY_SHARE:
                of_one = roughly(number(low.to(tl.int32)), best, temperature).to(tl.float64)
            is_last = (low > edge) & (reached - beyond < 1.5 * of_one)
            tl.store(own, tl.where(is_last, low - 1, low).to(tl.float64))
            tl.store(own + most, tl.where(is_last, low, high).to(tl.float64))
            tl.store(own + 2 * most, tl.where(is_last, reached, beyond))
            tl.store(own + 3 * most, wished)
            tl.store(arrived + program, 0)


@triton.jit(do_not_specialize=("tokens", "most", "stretches", "per"))
def _weigh(logits, stride, size, rows, numbers, tokens, state, most, sums, ties, drawn, stretches,
           per, STRETCH: tl.constexpr):  # fmt: skip
    """One program per `per` stretches of a row: sums weights above the edge, counts logits equal to it."""
    program = tl.program_id(0)
    begin = tl.program_id(1) * per
    row, best, temperature, is_drawn = row_of(logits, stride, rows, numbers, tokens, program)
    top_k = tl.load(numbers + program * 5 + 1)
    top_p = tl.load(numbers + program * 5 + 2)
    if is_drawn & _is_open(drawn, program, top_k, top_p):
        edge, _ = _edge(state, most, program, best, temperature, top_k, top_p)
        bound = least(best, temperature, tl.load(numbers + program * 5 + 3))
        for stretch in range(begin, tl.minimum(begin + per, stretches)):
            ids = stretch * STRETCH + tl.arange(0, STRETCH)
            x = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
            there = (ids < size) & (x >= bound)
            place = ordered(x)
            weights = tl.where(there & (place > edge), weight(x, best, temperature), 0.0)
            tl.store(sums + program * stretches + stretch, tl.sum(weights, 0))
            equal = (there & (place == edge)).to(tl.int32)
            tl.store(ties + program * stretches + stretch, tl.sum(equal, 0))


@triton.jit(do_not_specialize=("stride", "size", "tokens", "most", "stretches"))
def _choose(logits, stride, size, rows, numbers, tokens, state, most, sums, ties, drawn,
            stretches, STRETCH: tl.constexpr, PAD: tl.constexpr):  # fmt: skip
    """One program per row: finds the stretch in which u times the total falls, then the token in it."""
    program = tl.program_id(0)
    row, best, temperature, is_drawn = row_of(logits, stride, rows, numbers, tokens, program)
    top_k = tl.load(numbers + program * 5 + 1)
    top_p = tl.load(numbers + program * 5 + 2)
    if is_drawn & _is_open(drawn, program, top_k, top_p):
        edge, equals = _edge(state, most, program, best, temperature, top_k, top_p)
        s = tl.arange(0, PAD)
        at = program * stretches + s
        above = tl.load(sums + at, mask=s < stretches, other=0.0)
        equal = tl.load(ties + at, mask=s < stretches, other=0)
        earlier = tl.cumsum(equal, 0) - equal
        kept = tl.minimum(tl.maximum(equals - earlier, 0.0), equal.to(tl.float64))
        of_one = tl.where(equals > 0.0, weight(number(edge), best, temperature), 0.0)
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
        bound = least(best, temperature, tl.load(numbers + program * 5 + 3))
        there = (ids < size) & (x >= bound)
        place = ordered(x)
        is_equal = there & (place == edge)
        is_kept = is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= kept_here)
        is_kept = is_kept | (there & (place > edge))
        weights = tl.where(is_kept, weight(x, best, temperature), 0.0)
        passed = tl.sum((before + tl.cumsum(weights, 0) <= wished).to(tl.int32), 0)
        furthest = tl.max(tl.where(weights > 0.0, c, 0), 0)
        token = stretch * STRETCH + tl.minimum(passed, furthest)
        tl.store(tokens + program, token.to(tl.int64))
