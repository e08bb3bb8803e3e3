"""Rows of which top_k or top_p leaves few tokens are drawn from in two launches; most rows are such.

The row is read once, in groups of 32 neighbours, of which only the largest logits are kept: the peaks.
Where k peaks lie at or above a number, so do k logits, and none of the k likeliest lies below it. So one
program finds such a number among the peaks, reads the groups that reach it once more, and has all that
matters within its registers. With top_p alone it takes as many groups as it can hold, and knows the
weight of the whole row: if what it holds weighs enough, the rest does not matter.

Smaller ids go first among equals, so only the first k groups whose peak equals the number matter. With
2k - 1 groups at most, a top_k up to 64 always finds its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.sampling.triton_row import least, number, ordered, roughly, row_of, weight


@triton.jit
def _is_asked(top_k, top_p, LARGEST_K: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(top_k < float("inf"), top_k <= LARGEST_K, top_p < 1.0)


@triton.jit(do_not_specialize=("tokens", "groups", "stretches", "per"))
def survey(logits, stride, size, rows, numbers, tokens, peaks, sums, groups, stretches, per,
           STRETCH: tl.constexpr, GROUP: tl.constexpr, LARGEST_K: tl.constexpr):  # fmt: skip
    """Program: `per` stretches of a row; the peak of each group and, with top_p alone, what all weighs."""
    program = tl.program_id(0)
    first = tl.program_id(1) * per
    row, best, temperature, is_drawn = row_of(logits, stride, rows, numbers, tokens, program)
    top_k = tl.load(numbers + program * 5 + 1)
    top_p = tl.load(numbers + program * 5 + 2)
    low = least(best, temperature, tl.load(numbers + program * 5 + 3))
    is_weighed = (top_k < float("inf")) == 0
    if is_drawn & _is_asked(top_k, top_p, LARGEST_K):
        for stretch in range(first, tl.minimum(first + per, stretches)):
            group = stretch * (STRETCH // GROUP) + tl.arange(0, STRETCH // GROUP)
            ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
            tl.store(peaks + program * groups + group, tl.max(x, 1), mask=group < groups)
            if is_weighed:
                weights = roughly(x, best, temperature)
                weights = tl.where((ids < size) & (x >= low), weights, 0.0)
                whole = tl.sum(tl.sum(weights, 1), 0)
                tl.store(sums + program * stretches + stretch, whole.to(tl.float64))


@triton.jit(do_not_specialize=("stride", "size", "tokens", "groups", "stretches"))
def draw_few(logits, stride, size, rows, numbers, tokens, peaks, sums, listed, held, held_ids, drawn,
             groups, stretches, GROUP: tl.constexpr, PEAKS: tl.constexpr, SUMS: tl.constexpr,
             LISTED: tl.constexpr, HELD: tl.constexpr, LARGEST_K: tl.constexpr):  # fmt: skip
    """Program: a row. Its token, if all that may be kept can be held; `drawn` says whether."""
    program = tl.program_id(0)
    row, best, temperature, is_drawn = row_of(logits, stride, rows, numbers, tokens, program)
    top_k = tl.load(numbers + program * 5 + 1)
    top_p = tl.load(numbers + program * 5 + 2)
    fits = is_drawn & _is_asked(top_k, top_p, LARGEST_K)
    if fits:
        has_k = top_k < float("inf")
        k = tl.minimum(top_k, LARGEST_K * 1.0).to(tl.int32)
        bound = least(best, temperature, tl.load(numbers + program * 5 + 3))
        high = ordered(best).to(tl.int64) + 1
        # All that lies further below the best weighs less than top_p leaves out.
        depth = tl.log(size.to(tl.float64)) - tl.log(tl.maximum(1.0 - top_p, 1e-300)) + 0.01
        floor = tl.maximum(best.to(tl.float64) - temperature * depth, -3e38).to(tl.float32)
        low = tl.where(has_k, -2147483648, ordered(floor)).to(tl.int64)

        # Any number is good that enough peaks reach and not too many: it is found soon.
        at_once: tl.constexpr = HELD // GROUP
        enough = tl.where(has_k, k, LARGEST_K // 2)
        most = tl.where(has_k & (k <= at_once // 2), at_once // 2, LARGEST_K)
        g = tl.arange(0, PEAKS)
        peak = ordered(tl.load(peaks + program * groups + g, mask=g < groups, other=float("-inf")))
        peak = tl.where(g < groups, peak, -2147483648)
        low, _, _ = _raise(peak, low, high, enough, most)
        room = tl.where(has_k, k, 65535)
        own_list = listed + program * LISTED
        num_groups = _list_groups(own_list, g, peak, groups, low, room, LISTED)
        fits = num_groups <= LISTED
        num_groups = tl.minimum(num_groups, LISTED)
        tl.debug_barrier()

        e = tl.arange(0, HELD)
        ids, x, there = _members(row, size, own_list, 0, num_groups, e, low, bound, GROUP)
        if num_groups > at_once:
            own = program * HELD
            found = 0
            for start in range(0, num_groups, at_once):
                ids, x, there = _members(
                    row, size, own_list, start, num_groups, e, low, bound, GROUP
                )
                at = found + tl.cumsum(there.to(tl.int32), 0) - 1
                tl.store(held + own + at, x, mask=there & (at < HELD))
                tl.store(held_ids + own + at, ids, mask=there & (at < HELD))
                found += tl.sum(there.to(tl.int32), 0)
            fits = fits & (found <= HELD)
            tl.debug_barrier()
            there = e < found
            x = tl.load(held + own + e, mask=there, other=float("-inf"))
            ids = tl.load(held_ids + own + e, mask=there, other=0)

        # From here on only what is held counts.
        place = tl.where(there, ordered(x), -2147483648)
        few = tl.where(has_k, k, HELD)
        low, count, beyond = _raise(place, low, high, few, few)
        equals = tl.where(count > few, few - beyond, HELD)
        place = _first_equals(place, low.to(tl.int32), equals)
        weights = tl.where(place > -2147483648, weight(x, best, temperature), 0.0)
        if top_p < 1.0:
            s = tl.arange(0, SUMS)
            whole = tl.load(sums + program * stretches + s, mask=s < stretches, other=0.0)
            total = tl.sum(weights, 0)
            wished = top_p * tl.where(has_k, total, tl.sum(whole, 0))
            fits = fits & (total >= wished)
            if fits:
                edge, lighter = _raise_by_share(place, weights, low, high, wished)
                of_one = weight(number(edge), best, temperature)
                needed = tl.ceil((wished - lighter) / tl.maximum(of_one, 1e-300))
                place = _first_equals(place, edge, tl.maximum(needed, 1.0))
                weights = tl.where(place > -2147483648, weights, 0.0)

        ends = tl.cumsum(weights, 0)
        wished = tl.load(numbers + program * 5 + 4) * tl.max(ends, 0)
        passed = tl.sum((ends <= wished).to(tl.int32), 0)
        furthest = tl.max(tl.where(weights > 0.0, e, 0), 0)
        token = tl.sum(tl.where(e == tl.minimum(passed, furthest), ids, 0), 0)
        if fits:
            tl.store(tokens + program, token.to(tl.int64))
    tl.store(drawn + program, fits.to(tl.int32))


@triton.jit
def _raise(place, low, high, enough, most):  # type: ignore[no-untyped-def]
    """A higher number that `enough` reach, best at most `most`; how many do, and how many reach more."""
    count = tl.sum((place >= low.to(tl.int32)).to(tl.int32), 0)
    beyond = 0
    while (count > most) & (high - low > 1):
        middle = (low + high) >> 1
        reach = tl.sum((place >= middle.to(tl.int32)).to(tl.int32), 0)
        is_enough = reach >= enough
        count = tl.where(is_enough, reach, count)
        beyond = tl.where(is_enough, beyond, reach)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low, count, beyond


@triton.jit
def _raise_by_share(place, weights, low, high, wished):  # type: ignore[no-untyped-def]
    """The highest place of which what lies there or above weighs as wished, and what lies above weighs."""
    lighter = tl.full((), 0.0, tl.float64)
    count = tl.sum((place >= low.to(tl.int32)).to(tl.int32), 0)
    beyond = 0
    while (count - beyond > 1) & (high - low > 1):  # until one is left between
        middle = (low + high) >> 1
        reaches = place >= middle.to(tl.int32)
        reach = tl.sum(reaches.to(tl.int32), 0)
        mass = tl.sum(tl.where(reaches, weights, 0.0), 0)
        is_enough = mass >= wished
        count = tl.where(is_enough, reach, count)
        beyond = tl.where(is_enough, beyond, reach)
        lighter = tl.where(is_enough, lighter, mass)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return tl.max(tl.where(place < high, place, -2147483648), 0), lighter


@triton.jit
def _list_groups(listed, g, peak, groups, low, room, LISTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """List groups above `low` and the first `room` that equal it. Returns how many there are."""
    above = (g < groups) & (peak > low.to(tl.int32))
    equal = (g < groups) & (peak == low.to(tl.int32))
    both = tl.cumsum(above.to(tl.int32) * 65536 + equal.to(tl.int32), 0)
    equals = both & 65535
    taken = above | (equal & (equals <= room))
    at = (both >> 16) + tl.minimum(equals, room) - 1
    tl.store(listed + at, g, mask=taken & (at < LISTED))
    return tl.sum(taken.to(tl.int32), 0)


@triton.jit
def _members(row, size, listed, start, num_groups, e, low, bound, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ids and logits of as many listed groups as fit, and which of them reach `low` and `bound`."""
    at = start + e // GROUP
    ids = tl.load(listed + at, mask=at < num_groups, other=0) * GROUP + e % GROUP
    there = (at < num_groups) & (ids < size)
    x = tl.load(row + ids, mask=there, other=float("-inf")).to(tl.float32)
    return ids, x, there & (ordered(x) >= low.to(tl.int32)) & (x >= bound)


@triton.jit
def _first_equals(place, low, equals):  # type: ignore[no-untyped-def]
    """Keep places above `low` and the first `equals` that equal it; move the others below all."""
    equal = place == low
    kept = (place > low) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= equals))
    return tl.where(kept, place, -2147483648)
