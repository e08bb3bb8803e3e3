"""Activations as integers, for products that add integers: blocks of 32 inputs share a scale.

A number is x = d (65536 h + 256 m + l) with three signed digits: within 2^-22 of the block's largest
magnitude, as close as float32. With one digit, x = d h with h in -127..127: this is rounding to 8 bits,
which users must request.

A row is a sequence of blocks: the digits, 32 bytes each, highest first; float32 d and the sum of the
rounded numbers; for each digit negated int32 sums over all 32 numbers, the first 16 and the last 16.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvant.kernels.cpu.compiled import compiled_worker
from kvant.kernels.cpu.vector import (
    BYTES,
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    WORDS,
    call,
    fetch_add,
    i64,
    load,
    load_i64,
    splat,
    store,
    words,
)
from kvant.models.cpu.info import GROUP
from kvant.models.cpu.layout import Round

EXACT, EIGHT_BITS = 3, 1
"""Digits of an activation: as exact as float32, or 8 bits."""

_LARGEST = {EXACT: 127.0 * 2**16, EIGHT_BITS: 127.0}
_SMALLEST = 1e-30  # blocks whose largest magnitude is below this become zero
_ROWS_AT_ONCE = 4


def block_bytes(digits: int) -> int:
    """Returns the bytes of 32 rounded inputs."""
    return (GROUP + 12) * digits + 8


def digit_sum(digits: int, digit: int, half: int | None) -> int:
    """Returns the offset in a block of the sum of a digit, over one half or over all inputs."""
    return GROUP * digits + 8 + 12 * digit + (0 if half is None else 4 + 4 * half)


def _gather(b: Any, x: Any, order: Any) -> Any:
    """Loads 16 float32 of the row at x, by their columns, int32 at `order`."""
    columns, found = load(b, WORDS, order, 4), ir.Constant(FLOATS, ir.Undefined)
    for lane in range(LANES):
        column = b.zext(b.extract_element(columns, ir.Constant(I32, lane)), I64)
        value = load(b, F32, b.add(x, b.shl(column, i64(2))), 4)
        found = b.insert_element(found, value, ir.Constant(I32, lane))
    return found


@intrinsic(prefer_literal=True)
def _round(typing: Any, digits: Any, ordered: Any, x: Any, order: Any, out: Any) -> Any:
    """Rounds 32 float32 to a block at `out`. NaN or infinity makes the scale not finite.

    x: their address, or that of their row where `ordered` says that their columns are at `order`.
    """
    count, gathers = digits.literal_value, ordered.literal_value
    signature = types.void(digits, ordered, types.int64, types.int64, types.int64)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, x, order, out = arguments
        if gathers:
            numbers = [_gather(b, x, b.add(order, i64(64 * i))) for i in range(2)]
        else:
            numbers = [load(b, FLOATS, b.add(x, i64(64 * i)), 4) for i in range(2)]
        sizes = [b.and_(b.bitcast(n, WORDS), words(0x7FFFFFFF)) for n in numbers]
        both = b.select(b.icmp_unsigned(">", sizes[0], sizes[1]), sizes[0], sizes[1])
        # As integers, NaN is larger than infinity, and infinity than numbers.
        largest = b.bitcast(call(b, "llvm.vector.reduce.umax.v16i32", I32, both), F32)
        is_small = b.fcmp_ordered("<", largest, ir.Constant(F32, _SMALLEST))
        nothing, most = ir.Constant(F32, 0.0), ir.Constant(F32, _LARGEST[count])
        scale = b.select(is_small, nothing, b.fdiv(largest, most))
        factor = b.select(is_small, nothing, b.fdiv(most, largest))
        totals: list[list[Any]] = [[] for _ in range(count)]
        total = nothing
        for half, values in enumerate(numbers):
            scaled = call(b, "llvm.rint.v16f32", FLOATS, b.fmul(values, splat(b, factor)))
            rest = b.fptosi(scaled, WORDS)
            both = call(b, "llvm.vector.reduce.add.v16i32", I32, rest)
            total = b.fadd(total, b.fmul(b.sitofp(both, F32), scale))
            for digit in reversed(range(count)):
                value = rest
                if digit:  # the next higher digits take what the lowest 8 bits leave
                    value = b.ashr(b.shl(rest, words(24)), words(24))
                    rest = b.ashr(b.sub(rest, value), words(8))
                place = b.add(out, i64(GROUP * digit + 16 * half))
                store(b, b.trunc(value, BYTES), place)
                totals[digit].append(b.neg(call(b, "llvm.vector.reduce.add.v16i32", I32, value)))
        last = b.add(out, i64(GROUP * count))
        store(b, scale, last, 4)
        store(b, total, b.add(last, i64(4)), 4)
        for digit, (first, second) in enumerate(totals):
            sums = ((None, b.add(first, second)), (0, first), (1, second))
            for which, value in sums:
                store(b, value, b.add(out, i64(digit_sum(count, digit, which))), 4)
        return context.get_dummy_value()

    return signature, generate


@cache
def round_worker(digits: int, *, ordered: bool = False) -> int:
    """Returns the address of void(task, _), which every thread runs. ordered: by the task's ORDER."""
    size, at_once, step = block_bytes(digits), _ROWS_AT_ONCE, 0 if ordered else 128
    gathers = int(ordered)

    def work(task: int, _: int) -> None:
        rows, blocks = load_i64(task + Round.ROWS), load_i64(task + Round.COLUMNS) // 32
        while True:
            first = fetch_add(task + Round.NEXT, at_once)
            if first >= rows:
                return
            for row in range(first, min(rows, first + at_once)):
                x = load_i64(task + Round.X) + row * load_i64(task + Round.X_STRIDE)
                out = load_i64(task + Round.OUT) + row * load_i64(task + Round.OUT_STRIDE)
                order = load_i64(task + Round.ORDER)
                for block in range(blocks):
                    here = order + 128 * block
                    _round(digits, gathers, x + step * block, here, out + size * block)

    return compiled_worker(work)
