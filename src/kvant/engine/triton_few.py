"""Rows of which top_k or top_p leaves few tokens are drawn from in two launches; most rows are such.

The row is read once, in groups of 32 neighbours, of which only the largest logits are kept: the peaks.
Where k peaks lie at or above a number, so do k logits, and none of the k likeliest lies below it. So one
program finds such a number among the peaks, reads the groups that reach it once more, and has all that
matters within its registers. With top_p alone it takes as many groups as it can hold, and knows the
weight of the whole row: if what it holds weighs enough, the rest is nobody's.

Of equals smaller ids go first, so of the groups whose peak equals the number itself only the first k
matter. With 2k - 1 groups at most, a top_k up to 64 always finds its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.engine.triton_row import least, number, ordered, roughly, row_of, weight


@triton.jit
def _is_asked(top_k, top_p, LARGEST_K: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(top_k < float("inf"), top_k <= LARGEST_K, top_p < 1.0)


@triton.jit(do_not_specialize=("groups", "stretches", "per"))
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


@triton.jit(do_not_specialize=("stride", "size", "groups", "stretches"))
def draw_few(logits, stride, size, rows, numbers, tokens, peaks, sums, listed, held, held_ids, drawn,
             groups, stretches, GROUP: tl.constexpr, PEAKS: tl.constexpr, SUMS: tl.constexpr,
             LISTED: tl.constexpr, HELD: tl.constexpr, LARGEST_K: tl.constexpr):  # fmt: skip
    """Program: a row. Its token, if all that may be kept can be held; `drawn` says whether."""
    program = tl.program_id(0)
    row, best, temperature, wanted = row_of(logits, stride, rows, numbers, tokens, program)
    top_k = tl.load(numbers + program * 5 + 1)
    top_p = tl.load(numbers + program * 5 + 2)
    fits = wanted & _is_asked(top_k, top_p, LARGEST_K)
    if fits:
        has_k = top_k < float("inf")
        k = tl.minimum(top_k, LARGEST_K * 1.0).to(tl.int32)
        at_once: tl.constexpr = HELD // GROUP
        # Peaks that are enough, and as many as may be: a number between is found sooner.
        enough = tl.where(has_k, k, LARGEST_K // 2)
        most = tl.where(has_k & (k <= at_once // 2), at_once // 2, LARGEST_K)
        g = tl.arange(0, PEAKS)
        place = ordered(tl.load(peaks + program * groups + g, mask=g < groups, other=float("-inf")))
        place = tl.where(g < groups, place, -2147483648)
        # All that lies further below the best weighs less than top_p leaves out.
        depth = temperature * (tl.log(size.to(tl.float64)) - tl.log(tl.maximum(1.0 - top_p, 1e-300)) + 0.01)
        floor = tl.maximum(best.to(tl.float64) - depth, -3e38).to(tl.float32)
        low = tl.where(has_k, -2147483648, ordered(floor)).to(tl.int64)
        top = ordered(best).to(tl.int64) + 1
        high = top
        count = tl.sum((place >= low.to(tl.int32)).to(tl.int32), 0)
        while (count > most) & (high - low > 1):
            middle = (low + high) >> 1
            reach = tl.sum((place >= middle.to(tl.int32)).to(tl.int32), 0)
            count = tl.where(reach >= enough, reach, count)
            low = tl.where(reach >= enough, middle, low)
            high = tl.where(reach >= enough, high, middle)

        above = (g < groups) & (place > low.to(tl.int32))
        equal = (g < groups) & (place == low.to(tl.int32))
        both = tl.cumsum(above.to(tl.int32) * 65536 + equal.to(tl.int32), 0)
        room = tl.where(has_k, k, 65535)
        taken = above | (equal & ((both & 65535) <= room))
        to = (both >> 16) + tl.minimum(both & 65535, room) - 1
        tl.store(listed + program * LISTED + to, g, mask=taken & (to < LISTED))
        num_groups = tl.sum(taken.to(tl.int32), 0)
        fits = num_groups <= LISTED
        num_groups = tl.minimum(num_groups, LISTED)
        tl.debug_barrier()

        e = tl.arange(0, HELD)
        bound = least(best, temperature, tl.load(numbers + program * 5 + 3))
        own = held + program * HELD
        own_ids = held_ids + program * HELD
        is_listed = e // GROUP < num_groups
        group = tl.load(listed + program * LISTED + e // GROUP, mask=is_listed, other=0)
        ids = group * GROUP + e % GROUP
        x = tl.load(row + ids, mask=is_listed & (ids < size), other=float("-inf")).to(tl.float32)
        there = is_listed & (ids < size) & (ordered(x) >= low.to(tl.int32)) & (x >= bound)
        if num_groups > at_once:
            found = tl.sum(there.to(tl.int32), 0)
            at = tl.cumsum(there.to(tl.int32), 0) - 1
            tl.store(own + at, x, mask=there)
            tl.store(own_ids + at, ids, mask=there)
            for start in range(at_once, num_groups, at_once):
                is_listed = start + e // GROUP < num_groups
                group = tl.load(
                    listed + program * LISTED + start + e // GROUP, mask=is_listed, other=0
                )
                ids = group * GROUP + e % GROUP
                is_listed = is_listed & (ids < size)
                x = tl.load(row + ids, mask=is_listed, other=float("-inf")).to(tl.float32)
                there = is_listed & (ordered(x) >= low.to(tl.int32)) & (x >= bound)
                at = found + tl.cumsum(there.to(tl.int32), 0) - 1
                tl.store(own + at, x, mask=there & (at < HELD))
                tl.store(own_ids + at, ids, mask=there & (at < HELD))
                found += tl.sum(there.to(tl.int32), 0)
            fits = fits & (found <= HELD)
            tl.debug_barrier()
            there = e < found
            x = tl.load(own + e, mask=there, other=float("-inf"))
            ids = tl.load(own_ids + e, mask=there, other=0)

        # Only what is held counts from here on.
        place = tl.where(there, ordered(x), -2147483648)
        count = tl.sum(there.to(tl.int32), 0)
        high = top
        beyond = 0
        while has_k & (count > k) & (high - low > 1):
            middle = (low + high) >> 1
            reach = tl.sum((place >= middle.to(tl.int32)).to(tl.int32), 0)
            count = tl.where(reach >= k, reach, count)
            beyond = tl.where(reach >= k, beyond, reach)
            low = tl.where(reach >= k, middle, low)
            high = tl.where(reach >= k, high, middle)
        equal = there & (place == low.to(tl.int32))
        equals = tl.where(has_k & (count > k), k - beyond, HELD)
        equal = equal & (tl.cumsum(equal.to(tl.int32), 0) <= equals)
        kept = equal | (there & (place > low.to(tl.int32)))
        weights = tl.where(kept, weight(x, best, temperature), 0.0)

        if top_p < 1.0:
            s = tl.arange(0, SUMS)
            total = tl.sum(weights, 0)
            everything = tl.load(sums + program * stretches + s, mask=s < stretches, other=0.0)
            wished = top_p * tl.where(has_k, total, tl.sum(everything, 0))
            fits = fits & (total >= wished)
            place = tl.where(kept, place, -2147483648)
            high = top
            lighter = tl.full((), 0.0, tl.float64)
            count = tl.sum(kept.to(tl.int32), 0)
            beyond = 0
            while fits & (high - low > 1) & (count - beyond > 1):
                middle = (low + high) >> 1
                reaches = place >= middle.to(tl.int32)
                mass = tl.sum(tl.where(reaches, weights, 0.0), 0)
                reach = tl.sum(reaches.to(tl.int32), 0)
                lighter = tl.where(mass >= wished, lighter, mass)
                beyond = tl.where(mass >= wished, beyond, reach)
                count = tl.where(mass >= wished, reach, count)
                low = tl.where(mass >= wished, middle, low)
                high = tl.where(mass >= wished, high, middle)
            edge = tl.max(tl.where(place < high, place, -2147483648), 0)
            of_one = weight(number(edge), best, temperature)
            needed = tl.maximum(tl.ceil((wished - lighter) / tl.maximum(of_one, 1e-300)), 1.0)
            equal = kept & (place == edge)
            equal = equal & (tl.cumsum(equal.to(tl.int32), 0) <= needed)
            kept = equal | (kept & (place > edge))
            weights = tl.where(kept, weights, 0.0)

        ends = tl.cumsum(weights, 0)
        passed = tl.sum((ends <= tl.load(numbers + program * 5 + 4) * tl.max(ends, 0)).to(tl.int32), 0)
        chosen = tl.minimum(passed, tl.max(tl.where(weights > 0.0, e, 0), 0))
        token = tl.sum(tl.where(e == chosen, ids, 0), 0)
        if fits:
            tl.store(tokens + program, token.to(tl.int64))
    tl.store(drawn + program, fits.to(tl.int32))
