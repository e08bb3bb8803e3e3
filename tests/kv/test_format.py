"""A format's identity and bytes."""

from __future__ import annotations

import itertools

import pytest

from kvant.kv.dtype import PAIR_NAMES, KVDtype
from kvant.kv.format import ScalePlace

# Bytes of K and V together for one token and KV head, computed by hand from the layouts.
BYTES = {
    KVDtype.FLOAT32: {64: 512, 128: 1024, 256: 2048},
    KVDtype.FLOAT16: {64: 256, 128: 512, 256: 1024},
    KVDtype.BFLOAT16: {64: 256, 128: 512, 256: 1024},
    KVDtype.FP8_E4M3: {64: 128, 128: 256, 256: 512},
    KVDtype.FP8_E4M3FNUZ: {64: 128, 128: 256, 256: 512},
    KVDtype.FP8_E5M2: {64: 128, 128: 256, 256: 512},
    KVDtype.FP8_PER_TOKEN_HEAD: {64: 136, 128: 264, 256: 520},
    KVDtype.INT8_PER_TOKEN_HEAD: {64: 136, 128: 264, 256: 520},
    KVDtype.INT4_PER_TOKEN_HEAD: {64: 72, 128: 136, 256: 264},
    KVDtype.NVFP4: {64: 72, 128: 144, 256: 288},
}
PAIR_BYTES = {
    "turboquant_k8v4": {64: 100, 128: 196, 256: 388},
    "turboquant_4bit_nc": {64: 70, 128: 134, 256: 262},
    "turboquant_k3v4_nc": {64: 62, 128: 118, 256: 230},
    "turboquant_3bit_nc": {64: 54, 128: 102, 256: 198},
}


@pytest.mark.parametrize("name", PAIR_BYTES)
def test_pair_names_take_the_bytes_of_their_two_layouts(name: str) -> None:
    k, v = PAIR_NAMES[name]
    found = {n: k.format.row_bytes(n) + v.format.row_bytes(n) for n in PAIR_BYTES[name]}
    assert found == PAIR_BYTES[name]


@pytest.mark.parametrize("dtype", BYTES)
def test_row_bytes_are_those_of_the_layout(dtype: KVDtype) -> None:
    assert {dim: 2 * dtype.format.row_bytes(dim) for dim in BYTES[dtype]} == BYTES[dtype]


def test_every_identity_is_its_own() -> None:
    prints = [dtype.format.fingerprint for dtype in KVDtype]
    assert len(set(prints)) == len(prints)


def test_fingerprints_are_stable() -> None:
    """Keys under which KV is kept: a change here makes every kept page unreadable."""
    assert KVDtype.FLOAT32.format.fingerprint == "294b66f3a369d341"
    assert KVDtype.INT4_PER_TOKEN_HEAD.format.fingerprint == "93823757e54240d9"
    assert KVDtype.NVFP4.format.fingerprint == "5b2e6150005b47d2"


def test_no_name_means_two_formats() -> None:
    names = itertools.chain.from_iterable((d.format.name, *d.format.aliases) for d in KVDtype)
    listed = list(names)
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("dtype", KVDtype)
def test_any_single_token_can_be_overwritten(dtype: KVDtype) -> None:
    """Verification and drafting rewrite single tokens; a format whose groups span tokens cannot."""
    assert dtype.format.token_span == 1


@pytest.mark.parametrize("dtype", KVDtype)
def test_scales_in_pages_are_counted(dtype: KVDtype) -> None:
    fmt = dtype.format
    assert (len(fmt.planes(128)) == 2) == (fmt.scale_place is ScalePlace.PLANE)
