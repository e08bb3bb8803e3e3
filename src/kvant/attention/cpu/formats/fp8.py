"""fp8_e4m3, fp8_e5m2 and turboquant_k8: 8-bit floats with an outside scale or none."""

from __future__ import annotations

from kvant.attention.cpu.arithmetic import bound_row, e4m3_code, e5m2_code, row_of
from kvant.attention.cpu.codes import E4M3, E4M3_FACTOR, load_bytes, unpack_bytes, wide
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.layout import Row
from kvant.kernels.cpu.vector import FLOATS, HALVES, float_of, load_f32, load_i64, store_u8
from kvant.kv.format import Encoding, KVFormat

_E5M2 = wide(  # the upper half of a float16
    8,
    lambda b, x: [b.fpext(b.bitcast(y, HALVES), FLOATS) for y in unpack_bytes(b, x)],
    lambda b, address: b.fpext(b.bitcast(load_bytes(b, address), HALVES), FLOATS),
)


def _write_e4m3(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    outer = float_of(load_i64(row + Row.OUTER))
    bound_row(x, n)
    for i in range(n):
        store_u8(codes + i, e4m3_code(load_f32(x + 4 * i) / outer))


def _write_e5m2(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    bound_row(x, n)
    for i in range(n):
        store_u8(codes + i, e5m2_code(load_f32(x + 4 * i)))


def kernels(declared: KVFormat) -> Kernels:
    if declared.encoding is Encoding.E5M2:
        return Kernels(_E5M2, _write_e5m2)
    return Kernels(E4M3, _write_e4m3, E4M3_FACTOR)
