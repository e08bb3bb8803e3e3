"""Samples rows in which top_k or top_p keeps few tokens, in two launches. Most rows are of this kind.

The first launch reads the row once, in groups of 32 neighbours, and keeps each group's largest logit, the
peak. If k peaks lie at or above a number, so do k logits, and none of the k likeliest lies below it. The
second launch finds such a number among the peaks, reads the groups that reach it again, and holds them in
registers. With top_p alone it takes as many groups as it can hold. The first launch gave the weight of the
whole row, so it knows whether the held logits reach the share.

Smaller ids go first among equals, so only the first k groups whose peak equals the number matter. These are
at most 2k - 1 groups, so a top_k of up to 64 always succeeds.
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
    """One program per `per` stretches of a row: stores each group's peak and, without top_k, the weights."""
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
    """One program per row: samples its token if the kept logits can be held, and stores that in `drawn`."""
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
        # All logits further below the best together weigh less than the share that top_p drops.
        depth = tl.log(size.to(tl.float64)) - tl.log(tl.maximum(1.0 - top_p, 1e-300)) + 0.01
        floor = tl.maximum(best.to(tl.float64) - temperature * depth, -3e38).to(tl.float32)
        low = tl.where(has_k, -2147483648, ordered(floor)).to(tl.int64)

        # Any number will do that at least `enough` and at most `most` peaks reach: bisection finds one soon.
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

        # From here on only the held logits are used.
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
    """Raises `low` while more than `most` places reach it and at least `enough` still do, by bisection.

    Returns the new bound, how many places reach it, and how many reach the last rejected bound.
    """
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
    """Returns the highest place such that the weights there and above reach `wished`, and those above it."""
    lighter = tl.full((), 0.0, tl.float64)
    count = tl.sum((place >= low.to(tl.int32)).to(tl.int32), 0)
    beyond = 0
    while (count - beyond > 1) & (high - low > 1):  # until one place is left between the bounds
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
    """Lists groups whose peak exceeds `low`, and the first `room` that equal it. Returns their number."""
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
    """Returns ids and logits of listed groups from `start`, and which of them reach `low` and `bound`."""
    at = start + e // GROUP
    ids = tl.load(listed + at, mask=at < num_groups, other=0) * GROUP + e % GROUP
    there = (at < num_groups) & (ids < size)
    x = tl.load(row + ids, mask=there, other=float("-inf")).to(tl.float32)
    return ids, x, there & (ordered(x) >= low.to(tl.int32)) & (x >= bound)


@triton.jit
def _first_equals(place, low, equals):  # type: ignore[no-untyped-def]
    """Keeps places above `low` and the first `equals` that equal it; sets the others to the lowest place."""
    equal = place == low
    kept = (place > low) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= equals))
    return tl.where(kept, place, -2147483648)
