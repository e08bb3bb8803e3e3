"""Matrix products with narrow weights: integer sums over 32 inputs, 16 outputs per vector.

`rounding` rounds activations to integers. `weights` has the layout of weights. Each lane adds the products
of 32 inputs with its output's codes in integers, which is exact. Then the sum is multiplied by both scales
and added in float32, block after block. That order does not depend on the number of rows of x, on a row's
position or on threads. So products are batch-invariant.

Codes are read and unpacked once for up to 8 rows of x.
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
    FOURS,
    HALVES,
    I32,
    WORDS,
    dot_fours,
    every,
    fetch_add,
    fma,
    i64,
    load,
    load_i64,
    prefetch,
    repeat,
    splat,
    store_first,
    words,
)
from kvant.models.cpu.info import GROUP, TILE
from kvant.models.cpu.layout import Product
from kvant.models.cpu.rounding import EIGHT_BITS, block_bytes, digit_sum
from kvant.models.cpu.weights import Code, code_bytes
from kvant.weights.format import Scale

_FETCHED_AHEAD = 8192  # bytes of a thread's own stream
_LINE = 64
_ZERO = {8: 7, 6: 5, 4: 3}
"""By bits: log2 of the code that means zero, in formats without offsets."""


def _codes(b: Any, code: Code, at: Any) -> list[Any]:
    """Unpacks a block's codes 0 .. 2^bits - 1 to 8 vectors FOURS. Vector s has inputs 4 s .. 4 s + 3."""
    if code.bits == 8:
        return [load(b, FOURS, b.add(at, i64(64 * s))) for s in range(8)]
    packed = [load(b, WORDS, b.add(at, i64(64 * v))) for v in range(4)]
    low = words(0x0F0F0F0F)
    found = [b.and_(one, low) for one in packed]
    found += [b.and_(b.lshr(one, words(4)), low) for one in packed]
    if code.bits == 6:
        for u in range(2):
            upper = load(b, WORDS, b.add(at, i64(256 + 64 * u)))
            for k in range(4):
                field = b.shl(upper, words(4 - 2 * k)) if k < 2 else upper
                field = b.lshr(upper, words(2)) if k == 3 else field
                at_place = b.and_(field, words(0x30303030))
                found[4 * u + k] = b.or_(found[4 * u + k], at_place)
    return [b.bitcast(one, FOURS) for one in found]


class _Beside:
    """Reads scales and offsets of a tile, which follow its codes; see `weights`."""

    def __init__(self, b: Any, code: Code, tile: Any, blocks: Any) -> None:
        self._b, self._code, fmt = b, code, code.format
        groups = max(1, GROUP // fmt.columns)
        self._size = (
            TILE * fmt.scale.num_bytes * groups
        )  # of a block, or of blocks that share a scale
        self._blocks = i64(max(1, fmt.columns // GROUP))
        self._scales = b.add(tile, b.mul(blocks, i64(code_bytes(code))))
        room = b.mul(b.sdiv(blocks, self._blocks), i64(self._size))
        self._offsets = b.add(self._scales, room)
        self._factors = b.add(self._offsets, room) if fmt.offsets else self._offsets
        per = fmt.superblock // GROUP if fmt.superblock else 1
        self._superblock = ir.Constant(ir.IntType(64), per)
        self._offset_factors = b.add(
            self._factors, b.mul(b.sdiv(blocks, self._superblock), i64(32))
        )

    def scales(self, block: Any, part: int) -> Any:
        """Returns the scales, FLOATS, of the `part`-th of a block's groups."""
        fmt, b = self._code.format, self._b
        at = b.add(self._scales, b.mul(b.sdiv(block, self._blocks), i64(self._size)))
        if fmt.scale is Scale.FLOAT32:
            return load(b, FLOATS, at)
        if fmt.scale is Scale.FLOAT16:
            return b.fpext(load(b, HALVES, at), FLOATS)
        small = load(b, BYTES, b.add(at, i64(TILE * part)))
        is_signed = fmt.scale is Scale.INT8
        wide = b.sext(small, WORDS) if is_signed else b.zext(small, WORDS)
        return b.fmul(b.sitofp(wide, FLOATS), self._factor(self._factors, block))

    def offsets(self, block: Any) -> Any:
        fmt, b = self._code.format, self._b
        at = b.add(self._offsets, b.mul(b.sdiv(block, self._blocks), i64(self._size)))
        if fmt.scale is Scale.FLOAT32:
            return load(b, FLOATS, at)
        if fmt.scale is Scale.FLOAT16:
            return b.fpext(load(b, HALVES, at), FLOATS)
        wide = b.zext(load(b, BYTES, at), WORDS)
        found = b.fmul(b.sitofp(wide, FLOATS), self._factor(self._offset_factors, block))
        return b.fneg(found)

    def _factor(self, factors: Any, block: Any) -> Any:
        b = self._b
        at = b.add(factors, b.mul(b.sdiv(block, self._superblock), i64(32)))
        return b.fpext(load(b, HALVES, at), FLOATS)


@intrinsic(prefer_literal=True)
def _multiply(
    typing: Any, code: Any, digits: Any, rows: Any, tile: Any, stride: Any, scales: Any, bias: Any,
    x: Any, x_stride: Any, blocks: Any, out: Any, out_stride: Any, lanes: Any,
) -> Any:  # fmt: skip
    """Multiplies a tile of the weight by `rows` rows of x and adds bias. Writes `lanes` outputs of each row.

    scales: one per output, if the format has such; scales and bias are float32 [16]. x: rounded rows.
    """
    kind, count, n = Code(code.literal_value), digits.literal_value, rows.literal_value
    signature = types.void(code, digits, rows, *[types.int64] * 10)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        (
            _, _, _, tile, stride, scales, bias, x, x_stride, blocks, out, out_stride, lanes,
        ) = arguments  # fmt: skip
        fmt, size = kind.format, code_bytes(kind)
        is_scaled = kind is Code.INT8
        beside = None if is_scaled else _Beside(b, kind, tile, blocks)
        groups = 1 if is_scaled else max(1, GROUP // fmt.columns)
        steps = 8 // groups
        x_at = [b.add(x, b.mul(x_stride, i64(r))) for r in range(n)]
        record = b.sdiv(stride, blocks)

        def broadcast(place: Any) -> Any:
            return splat(b, load(b, F32, place, 4))

        def begin(row: Any, digit: int, half: int | None) -> Any:
            """Returns the initial sum of products, which makes codes relative to the code of zero."""
            if fmt.offsets:
                return words(0)
            found = splat(b, load(b, I32, b.add(row, i64(digit_sum(count, digit, half))), 4))
            return b.shl(found, words(_ZERO[kind.bits]))

        def add(block: Any, totals: list[Any]) -> list[Any]:
            new = list(totals)
            ahead = b.add(b.add(tile, i64(_FETCHED_AHEAD)), b.mul(block, record))
            for line in range(0, size, _LINE):
                prefetch(b, b.add(ahead, i64(line)))
            vectors = _codes(b, kind, b.add(tile, b.mul(block, i64(size))))
            here = [b.add(row, b.mul(block, i64(block_bytes(count)))) for row in x_at]
            behind = [b.add(row, i64(GROUP * count)) for row in here]
            for group in range(groups):
                half = None if groups == 1 else group
                sums = [[begin(row, k, half) for k in range(count)] for row in here]
                for s in range(steps * group, steps * (group + 1)):
                    for r in range(n):
                        for k in range(count):
                            four = load(b, I32, b.add(here[r], i64(GROUP * k + 4 * s)), 4)
                            sums[r][k] = dot_fours(
                                context, b, sums[r][k], vectors[s], four, kind.bits
                            )
                w_scale = None if beside is None else beside.scales(block, group)
                offset = beside.offsets(block) if beside is not None and fmt.offsets else None
                for r in range(n):
                    value = b.sitofp(sums[r][0], FLOATS)
                    for digit in sums[r][1:]:
                        value = fma(b, value, every(FLOATS, 256.0), b.sitofp(digit, FLOATS))
                    x_scale = broadcast(behind[r])
                    if offset is not None:
                        new[r] = fma(b, broadcast(b.add(behind[r], i64(4))), offset, new[r])
                    if w_scale is None:
                        new[r] = fma(b, value, x_scale, new[r])
                    else:
                        new[r] = fma(b, b.fmul(value, x_scale), w_scale, new[r])
            return new

        new = repeat(b, blocks, [every(FLOATS, 0.0)] * n, add)
        biases = load(b, FLOATS, bias, 4)
        for r, value in enumerate(new):
            if is_scaled:
                value = b.fmul(value, load(b, FLOATS, scales, 4))
            store_first(b, b.fadd(value, biases), b.add(out, b.mul(out_stride, i64(r))), lanes)
        return context.get_dummy_value()

    return signature, generate


@cache
def integer_worker(code: Code, digits: int) -> int:
    """Returns the address of void(task, _), which every thread runs. The task's x are rounded rows."""
    number, eight = int(code), digits == EIGHT_BITS

    def work(task: int, _: int) -> None:
        weight, stride = load_i64(task + Product.WEIGHT), load_i64(task + Product.STRIDE)
        scales, bias = load_i64(task + Product.SCALES), load_i64(task + Product.BIAS)
        outputs, blocks = load_i64(task + Product.OUTPUTS), load_i64(task + Product.COLUMNS) // 32
        x, x_stride = load_i64(task + Product.X), load_i64(task + Product.X_STRIDE)
        out, out_stride = load_i64(task + Product.OUT), load_i64(task + Product.OUT_STRIDE)
        rows, chunk = load_i64(task + Product.ROWS), load_i64(task + Product.CHUNK)
        tiles = (outputs + 15) // 16
        while True:
            first = fetch_add(task + Product.NEXT, chunk)
            if first >= tiles:
                return
            end = min(tiles, first + chunk)
            for panel in range(0, rows, 64):
                last = min(rows, panel + 64)
                for tile in range(first, end):
                    w, s, d = weight + tile * stride, scales + 64 * tile, bias + 64 * tile
                    lanes = outputs - 16 * tile
                    row = panel
                    while row < last:
                        left, a = last - row, x + row * x_stride
                        c = out + row * out_stride + 64 * tile
                        if eight and left >= 8:
                            taken = 8
                            _multiply(number, digits, 8, w, stride, s, d, a, x_stride, blocks, c,
                                      out_stride, lanes)  # fmt: skip
                        elif left >= 4:
                            taken = 4
                            _multiply(number, digits, 4, w, stride, s, d, a, x_stride, blocks, c,
                                      out_stride, lanes)  # fmt: skip
                        elif left >= 2:
                            taken = 2
                            _multiply(number, digits, 2, w, stride, s, d, a, x_stride, blocks, c,
                                      out_stride, lanes)  # fmt: skip
                        else:
                            taken = 1
                            _multiply(number, digits, 1, w, stride, s, d, a, x_stride, blocks, c,
                                      out_stride, lanes)  # fmt: skip
                        row += taken

    return compiled_worker(work)
