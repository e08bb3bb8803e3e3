"""The table of CPU kernels agrees with the declarations, and a new format needs one file."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from kvant.attention.cpu.backend import CpuBackend
from kvant.attention.cpu.format import Kernels, codes_of, format_of
from kvant.attention.cpu.formats import SERVED, int8_per_token_head
from kvant.attention.cpu.layout import Row, Scaling
from kvant.kv.format import KVFormat, ScalePlace
from tests.attention.made_up import added
from tests.attention.triton import case

FORMATS = sorted(SERVED, key=str)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_kernels_are_those_of_the_declaration(dtype) -> None:  # type: ignore[no-untyped-def]
    found, declared = format_of(dtype), dtype.format
    assert found.codes.bits == declared.bits
    assert codes_of(found.number) is found.codes, "one encoding has one decoder"
    in_pages = declared.scale_place is ScalePlace.PLANE
    assert (found.scaling is Scaling.NONE) == (not in_pages)
    assert found.codes.in_blocks == (found.scaling is Scaling.BLOCK)


def test_a_new_format_needs_its_declaration_its_codec_and_one_file() -> None:
    from numba import njit

    from kvant.kernels.cpu.vector import load_f32, load_i64, store_f32

    write_int8 = njit(int8_per_token_head._write)

    def write(row: int, _: int) -> None:
        write_int8(row, 0)
        scale = load_i64(row + Row.SCALES)
        store_f32(scale, load_f32(scale) + load_f32(scale))

    def kernels(declared: KVFormat) -> Kernels:
        int8 = int8_per_token_head.kernels(declared)
        return Kernels(int8.codes, write, factor=0.5)

    with added(backend="cpu", kernels=kernels) as dtype:
        x = case.prepare(dtype, sequences=((40, 1), (17, 2)), dtype=torch.float32)
        CpuBackend().write(x.cache, x.k, x.v, x.step)
        found = CpuBackend().attend(x.cache, x.q, x.step, x.params)
        assert case.error(found, x.expected()) < 1e-5
