"""The table of Triton kernels agrees with the declarations, and a new format needs one file."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed here")

import triton
import triton.language as tl

from kvant.attention.triton.backend import TritonBackend
from kvant.attention.triton.format import Kernels, format_of
from kvant.attention.triton.formats import SERVED, int8_per_token_head
from kvant.kv.codecs import TORCH_ELEMENT
from kvant.kv.dtype import KVDtype
from kvant.kv.format import KVFormat
from tests.attention.made_up import added
from tests.attention.triton import case

HEAD = 128
FORMATS = sorted(SERVED, key=str)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_words_and_scales_cover_the_declared_planes(dtype: KVDtype) -> None:
    found, planes = format_of(dtype), dtype.format.planes(HEAD)
    units = HEAD * found.bits // found.word_bits
    assert units * found.word.itemsize == planes[0].row_bytes
    assert found.elements * found.bits == (24 if found.bits == 3 else found.word_bits)
    if found.scale_word is None:
        assert len(planes) == 1
        assert not found.per_row
        assert not found.per_block
    else:
        scales = HEAD // found.block if found.per_block else 1
        assert scales * found.scale_word.itemsize == planes[1].row_bytes
        assert TORCH_ELEMENT[planes[1].element].itemsize <= found.scale_word.itemsize


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_file_brings_the_functions_that_its_declaration_calls_for(dtype: KVDtype) -> None:
    found = format_of(dtype)
    assert found.decode is not None
    assert found.encode is not None
    assert (found.row_scale is not None) == found.per_row
    assert (found.block_scale is not None) == found.per_block


def test_formats_are_told_apart_by_triton() -> None:
    assert len({repr(format_of(dtype)) for dtype in FORMATS}) == len(FORMATS)
    assert len({format_of(dtype).cache_key for dtype in FORMATS}) == len(FORMATS)


@triton.jit
def _encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    int8_per_token_head.encode(
        x, head, there, codes, scales, outer, FORMAT, OUTER, HEAD, PAD, ROWS, PTX
    )
    scale = tl.load(scales, mask=there, other=0).to(tl.float32, bitcast=True)
    tl.store(scales, (scale + scale).to(tl.int32, bitcast=True), mask=there)


def _kernels(declared: KVFormat) -> Kernels:
    int8 = int8_per_token_head.kernels(declared)
    return Kernels(
        int8.decode, _encode, row_scale=int8.row_scale, factor=int8.factor / 2, bias=int8.bias / 2
    )


@pytest.mark.skipif(not case.INTERPRETED, reason="the kernels are the same when compiled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on NaN and infinities
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_new_format_needs_its_declaration_its_codec_and_one_file() -> None:
    with added(backend="triton", kernels=_kernels) as dtype:
        x = case.prepare(dtype, sequences=((40, 1), (17, 2)))
        TritonBackend().write(x.cache, x.k, x.v, x.step)
        written = [plane.clone() for plane in x.cache.k]
        case.EXACT.write(x.cache, x.k, x.v, x.step)
        assert case.same_bytes(written, x.cache.k)
        found = TritonBackend().attend(x.cache, x.q, x.step, x.params)
        assert case.error(found, x.expected()) < 2e-3
