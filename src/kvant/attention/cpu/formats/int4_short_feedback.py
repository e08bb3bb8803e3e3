"""int4_short_feedback: int4_short's bytes, rounded with the errors of the elements before."""

from __future__ import annotations

from kvant.attention.cpu.codes import packed
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.formats.int4_feedback import store_fed
from kvant.attention.cpu.formats.int4_short import scaled_short
from kvant.kv.format import KVFormat


def _write(row: int, _: int) -> None:
    scale, zero_point = scaled_short(row)
    store_fed(row, scale, zero_point)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(packed(declared.bits), _write)
