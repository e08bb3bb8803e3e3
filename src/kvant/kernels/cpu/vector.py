"""Vector code for numba: sixteen float32 lanes at a time, written as LLVM instructions.

LLVM vectorises many of numba's loops itself, but not conversions of packed codes or transposes.
So this module emits the innermost loops, and everything around them is plain numba.
On CPUs with AVX-512 sixteen lanes are one register, with AVX2 two. Addresses are plain int64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
FLOATS = ir.VectorType(F32, LANES)
WORDS = ir.VectorType(I32, LANES)
HALVES = ir.VectorType(F16, LANES)
SHORTS = ir.VectorType(I16, LANES)
BYTES = ir.VectorType(I8, LANES)
FOURS = ir.VectorType(I8, 4 * LANES)
"""Four bytes per lane."""
_POINTER = ir.PointerType()
_INTO_L2 = (
    2  # LLVM's locality of prefetcht1: a core can have more misses to L2 in flight than to L1
)


def i64(n: int) -> Any:
    return ir.Constant(I64, n)


def every(type_: Any, value: float) -> Any:
    """Returns a vector with this constant in every lane."""
    return ir.Constant(type_, [value] * type_.count)


def _floats(value: float) -> Any:
    return every(FLOATS, value)


def words(value: int) -> Any:
    return every(WORDS, value - (1 << 32) if value >= 1 << 31 else value)


def load(b: Any, type_: Any, address: Any, align: int = 1) -> Any:
    found = b.load(b.inttoptr(address, _POINTER), typ=type_)
    found.align = align
    return found


def store(b: Any, value: Any, address: Any, align: int = 1) -> None:
    b.store(value, b.inttoptr(address, _POINTER)).align = align


def load_first(b: Any, type_: Any, address: Any, count: Any) -> Any:
    """Loads the first `count` (at run time) elements of a vector; the others are 0 and not read."""
    n = type_.count
    lanes = ir.Constant(ir.VectorType(I64, n), list(range(n)))
    mask = b.icmp_signed("<", lanes, splat(b, count, n))
    name = f"llvm.masked.load.v{n}i{type_.element.width}.p0"
    mask_type = ir.VectorType(I1, n)
    return call(
        b, name, type_, b.inttoptr(address, _POINTER), ir.Constant(I32, 1), mask,
        ir.Constant(type_, [0] * n), given=(_POINTER, I32, mask_type, type_),
    )  # fmt: skip


def call(b: Any, name: str, returns: Any, *arguments: Any, given: Any = None) -> Any:
    """Calls an LLVM intrinsic by its full name."""
    found = [a.type for a in arguments] if given is None else list(given)
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(returns, found), name)
    return b.call(function, arguments)


def shuffle(b: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def splat(b: Any, scalar: Any, n: int = LANES) -> Any:
    nothing = ir.Constant(ir.VectorType(scalar.type, n), ir.Undefined)
    one = b.insert_element(nothing, scalar, ir.Constant(I32, 0))
    return shuffle(b, one, nothing, [0] * n)


def load_bf16_lanes(b: Any, address: Any) -> Any:
    """Loads sixteen bfloat16 numbers as FLOATS, exactly."""
    return b.bitcast(b.shl(b.zext(load(b, SHORTS, address, 2), WORDS), words(16)), FLOATS)


def is_set(b: Any, flag: Any) -> Any:
    """Returns a mask of lanes, all true if the int64 `flag` is not zero, else all false."""
    return splat(b, b.icmp_signed("!=", flag, i64(0)))


def to_bf16_where(b: Any, mask: Any, x: Any) -> Any:
    """Rounds FLOATS x to bfloat16 numbers where mask is true: nearest even, NaN stays NaN."""
    bits = b.bitcast(x, WORDS)
    odd = b.and_(b.lshr(bits, words(16)), words(1))
    rounded = b.and_(b.add(bits, b.add(odd, words(0x7FFF))), words(0xFFFF0000))
    takes = b.and_(mask, b.fcmp_ordered("ord", x, x))
    return b.select(takes, b.bitcast(rounded, FLOATS), x)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, f"llvm.fma.v{LANES}f32", FLOATS, x, y, z)


def prefetch(b: Any, address: Any) -> None:
    call(
        b, "llvm.prefetch.p0", ir.VoidType(), b.inttoptr(address, _POINTER), ir.Constant(I32, 0),
        ir.Constant(I32, _INTO_L2), ir.Constant(I32, 1),
    )  # fmt: skip


def has_feature(context: Any, name: str) -> bool:
    """Whether the CPU that numba compiles for has a feature, by LLVM's name."""
    return f"+{name}" in context.codegen().magic_tuple()[2].split(",")


def dot_fours(context: Any, b: Any, sums: Any, codes: Any, x: Any, bits: int) -> Any:
    """Adds to sums (WORDS), in each lane, four products of codes (FOURS, unsigned, of `bits`) and x.

    x: a word of four signed bytes, the same for all lanes. Integer arithmetic is exact.
    """
    x = splat(b, x)
    if has_feature(context, "avx512vnni"):
        name = "llvm.x86.avx512.vpdpbusd.512"
        return call(b, name, WORDS, sums, b.bitcast(codes, WORDS), x)
    half, found = ir.VectorType(I32, LANES // 2), []
    codes = b.bitcast(codes, WORDS)
    for start in (0, LANES // 2):
        part = list(range(start, start + LANES // 2))
        one, w, factor = (shuffle(b, v, v, part) for v in (sums, codes, x))
        if has_feature(context, "avxvnni"):
            one = call(b, "llvm.x86.avx512.vpdpbusd.256", half, one, w, factor)
        else:
            one = _dot_avx2(b, one, w, factor, bits)
        found.append(one)
    return shuffle(b, found[0], found[1], list(range(LANES)))


def _dot_avx2(b: Any, sums: Any, codes: Any, x: Any, bits: int) -> Any:
    """Computes eight lanes.

    Sums of two products are 16 bits, which 8-bit codes overflow: they go by halves.
    """
    bytes_, shorts = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    x = b.bitcast(x, bytes_)
    parts = [(b.bitcast(codes, bytes_), 1)]
    if bits == 8:
        low = every(codes.type, 0x0F0F0F0F)
        upper = b.and_(b.lshr(codes, every(codes.type, 4)), low)
        parts = [(b.bitcast(b.and_(codes, low), bytes_), 1), (b.bitcast(upper, bytes_), 16)]
    for part, factor in parts:
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", shorts, part, x)
        fours = call(b, "llvm.x86.avx2.pmadd.wd", codes.type, pairs, every(shorts, factor))
        sums = b.add(sums, fours)
    return sums


def store_first(b: Any, value: Any, address: Any, count: Any) -> None:
    """Stores the first `count` (at run time) of 16 float32."""
    lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
    mask = b.icmp_signed("<", lanes, splat(b, count))
    call(
        b, "llvm.masked.store.v16f32.p0", ir.VoidType(), value, b.inttoptr(address, _POINTER),
        ir.Constant(I32, 1), mask, given=(FLOATS, _POINTER, I32, ir.VectorType(I1, LANES)),
    )  # fmt: skip


def look_up(context: Any, b: Any, table: tuple[float, ...], index: Any) -> Any:
    """Returns table[index & (len - 1)] in every lane; the table has 8 or 16 numbers, held in registers."""
    if "+avx512f" in context.codegen().magic_tuple()[2]:
        numbers = ir.Constant(FLOATS, list(table) * (LANES // len(table)))
        return call(b, "llvm.x86.avx512.permvar.sf.512", FLOATS, numbers, index)
    half = ir.VectorType(F32, 8)
    found = []
    for start in (0, 8):
        lanes = shuffle(b, index, index, list(range(start, start + 8)))
        parts = [
            call(b, "llvm.x86.avx2.permps", half, ir.Constant(half, list(table[i : i + 8])), lanes)
            for i in range(0, len(table), 8)
        ]
        if len(parts) == 2:
            eight = every(lanes.type, 8)
            upper = b.icmp_unsigned("!=", b.and_(lanes, eight), every(lanes.type, 0))
            parts = [b.select(upper, parts[1], parts[0])]
        found.append(parts[0])
    return shuffle(b, found[0], found[1], list(range(LANES)))


def transpose(b: Any, rows: list[Any], n: int) -> list[Any]:
    """Transposes 16 rows of n words (n = 4, 8, 16) to n vectors whose lanes are the rows."""
    found = rows
    while len(found) > n:
        # Rows r and r + n share a vector; then these and the pair 2 n further, and so on.
        width = found[0].type.count
        found = [
            shuffle(b, found[i], found[i + n], list(range(2 * width)))
            for group in range(0, len(found), 2 * n)
            for i in range(group, group + n)
        ]
    step = 1
    while step < n:
        low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        for i in range(n):
            if not i & step:
                x, y = found[i], found[i + step]
                found[i], found[i + step] = shuffle(b, x, y, low), shuffle(b, x, y, high)
        step *= 2
    return found


# -- functions of lanes ------------------------------------------------------------------------

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SMALLEST = -87.0
# e^r for |r| <= ln(2) / 2, as in Cephes' expf (S. Moshier); the error is about 1 unit in the last place.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)


def exp_lanes(b: Any, x: Any) -> Any:
    """Returns e^x of FLOATS x <= 0: 0 below -87, 1 for 0, NaN for NaN."""
    is_small = b.fcmp_ordered("<", x, _floats(_SMALLEST))
    x = b.select(is_small, _floats(_SMALLEST), x)
    n = call(b, "llvm.rint.v16f32", FLOATS, b.fmul(x, _floats(_LOG2_E)))
    r = fma(b, n, _floats(-_LN2_HIGH), x)
    r = fma(b, n, _floats(-_LN2_LOW), r)
    y = _floats(_EXP[0])
    for coefficient in _EXP[1:]:
        y = fma(b, y, r, _floats(coefficient))
    y = b.fadd(fma(b, y, b.fmul(r, r), r), _floats(1.0))
    power = b.shl(b.add(b.fptosi(n, WORDS), words(127)), words(23))
    y = b.fmul(y, b.bitcast(power, FLOATS))
    y = b.select(is_small, _floats(0.0), y)
    return b.select(b.fcmp_unordered("uno", x, x), x, y)


# -- scalars -----------------------------------------------------------------------------------


def _reader(type_: Any, returns: Any, finish: Any) -> Any:
    def read(typing: Any, address: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            return finish(b, load(b, type_, arguments[0]))

        return returns(types.int64), generate

    return intrinsic(read)


load_i64 = _reader(I64, types.int64, lambda b, x: x)
load_i32 = _reader(I32, types.int64, lambda b, x: b.sext(x, I64))
load_u8 = _reader(I8, types.int64, lambda b, x: b.zext(x, I64))
load_f32 = _reader(F32, types.float32, lambda b, x: x)
load_f16 = _reader(F16, types.float32, lambda b, x: b.fpext(x, F32))
load_bf16 = _reader(
    I16,
    types.float32,
    lambda b, x: b.bitcast(b.shl(b.zext(x, I32), ir.Constant(I32, 16)), F32),
)


def _writer(given: Any, prepare: Any) -> Any:
    def write(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            store(b, prepare(b, arguments[1]), arguments[0])
            return context.get_dummy_value()

        return types.void(types.int64, given), generate

    return intrinsic(write)


def _to_bf16(b: Any, x: Any) -> Any:
    """Rounds x to bfloat16: nearest even; NaN stays NaN."""
    bits = b.bitcast(x, I32)
    odd = b.and_(b.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    rounded = b.add(bits, b.add(odd, ir.Constant(I32, 0x7FFF)))
    bits = b.select(b.fcmp_unordered("uno", x, x), ir.Constant(I32, 0x7FC00000), rounded)
    return b.trunc(b.lshr(bits, ir.Constant(I32, 16)), I16)


store_i64 = _writer(types.int64, lambda b, x: x)
store_u8 = _writer(types.int64, lambda b, x: b.trunc(x, I8))
store_i32 = _writer(types.int64, lambda b, x: b.trunc(x, I32))
store_f32 = _writer(types.float32, lambda b, x: x)
store_f16 = _writer(types.float32, lambda b, x: b.fptrunc(x, F16))
store_bf16 = _writer(types.float32, _to_bf16)


@intrinsic
def to_bf16_if(typing: Any, flag: Any, x: Any) -> Any:
    """Rounds x to a bfloat16 number if flag is not zero."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        flag, x = arguments
        wide = b.shl(b.zext(_to_bf16(b, x), I32), ir.Constant(I32, 16))
        return b.select(b.icmp_signed("!=", flag, i64(0)), b.bitcast(wide, F32), x)

    return types.float32(types.int64, types.float32), generate


@intrinsic
def bits_of(typing: Any, x: Any) -> Any:
    """Returns the bits of a float32, 0 .. 2^32 - 1."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.zext(b.bitcast(arguments[0], I32), I64)

    return types.int64(types.float32), generate


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """Returns the float32 with these bits."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.bitcast(b.trunc(arguments[0], I32), F32)

    return types.float32(types.int64), generate


@intrinsic
def nearest(typing: Any, x: Any) -> Any:
    """Rounds x to an integer, ties to even; returns float32."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return call(b, "llvm.rint.f32", F32, arguments[0])

    return types.float32(types.float32), generate


@intrinsic
def root(typing: Any, x: Any) -> Any:
    """Returns the square root, correctly rounded."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return call(b, "llvm.sqrt.f32", F32, arguments[0])

    return types.float32(types.float32), generate


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Adds atomically to an int64 in memory; returns its previous value."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        place = b.inttoptr(arguments[0], _POINTER)
        return b.atomic_rmw("add", place, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def prefetch_line(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        prefetch(b, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def run_at(typing: Any, function: Any, a: Any, b_: Any) -> Any:
    """Calls a C function void(int64, int64) by its address."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        target = b.inttoptr(arguments[0], kind.as_pointer())
        b.call(target, arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def enter(typing: Any, function: Any, a: Any, b_: Any, c: Any, d: Any) -> Any:
    """Calls a C function int64(int64, int64, int64, int64) by its address."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * 4)
        return b.call(b.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(*[types.int64] * 5), generate


@intrinsic
def fork(typing: Any, parallel: Any, function: Any, data: Any, threads: Any) -> Any:
    """Calls GOMP_parallel(function, data, threads, 0) by its address: the function runs on every thread."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        parallel, function, data, threads = arguments
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I32, I32])
        target = b.inttoptr(parallel, kind.as_pointer())
        b.call(target, [function, data, b.trunc(threads, I32), ir.Constant(I32, 0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def zero(typing: Any, address: Any, num_bytes: Any) -> Any:
    """Fills memory with zeros."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        call(
            b, "llvm.memset.p0.i64", ir.VoidType(), b.inttoptr(arguments[0], _POINTER),
            ir.Constant(I8, 0), arguments[1], ir.Constant(I1, 0),
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def repeat(b: Any, count: Any, start: list[Any], body: Any) -> list[Any]:
    """Emits body(index, carried values) -> carried values, `count` times, at least once."""
    before = b.block
    loop, done = b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    index = b.phi(I64)
    index.add_incoming(i64(0), before)
    carried = []
    for x in start:
        carried.append(b.phi(x.type))
        carried[-1].add_incoming(x, before)
    made = body(index, carried)
    last = b.block  # the body's last block, since it may contain loops
    following = b.add(index, i64(1))
    index.add_incoming(following, last)
    for old, new in zip(carried, made, strict=True):
        old.add_incoming(new, last)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    return made  # type: ignore[no-any-return]
