"""What every member of KVDtype promises. A new format is tested here by being in the enum."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvant.kv.codecs import CLAMP, TORCH_ELEMENT, codec_for
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Encoding, Granularity
from tests.kv.codecs.comparison import plane_bytes, same_bytes, same_values, usual_scale
from tests.kv.codecs.golden import GOLDEN, ROWS, read_golden_codes
from tests.kv.codecs.oracle import E4M3FN, ENCODE_ROW
from tests.strategies import FLOAT_DTYPES, HEAD_DIMS

every_format = pytest.mark.parametrize("dtype", KVDtype, ids=str)
every_row = pytest.mark.parametrize("name", ROWS)

_NATIVE = {Encoding.FLOAT32, Encoding.FLOAT16, Encoding.BFLOAT16}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def needs(dtype: KVDtype, table: dict[KVDtype, object], what: str, where: str) -> None:
    if dtype not in table:
        pytest.fail(f"{dtype!r} has no {what}: add an entry to {where}")


@every_format
def test_every_format_has_golden_vectors_and_a_second_definition(dtype: KVDtype) -> None:
    needs(dtype, {**GOLDEN}, "golden vectors", "GOLDEN in tests/kv/codecs/golden.py")
    needs(dtype, {**ENCODE_ROW}, "oracle", "ENCODE_ROW in tests/kv/codecs/oracle.py")
    missing = ROWS.keys() - GOLDEN[dtype].planes.keys()
    assert not missing, f"add the bytes of rows {missing} to GOLDEN[{dtype!r}]"
    encoding = dtype.format.encoding
    if encoding not in _NATIVE:
        assert encoding in read_golden_codes(), (
            f"add [{encoding.value}] with the number behind each code to "
            "tests/kv/codecs/golden_codes.txt"
        )


@every_row
@every_format
def test_golden_rows_are_stored_as_the_frozen_bytes(dtype: KVDtype, name: str) -> None:
    golden = GOLDEN[dtype]
    x = torch.tensor([ROWS[name]], dtype=torch.float64)
    planes = codec_for(dtype).encode(x, usual_scale(dtype, golden.scale))
    assert tuple(plane_bytes(plane).hex() for plane in planes) == golden.planes[name]


@every_format
def test_golden_bytes_decode_to_the_frozen_numbers(dtype: KVDtype) -> None:
    golden = GOLDEN[dtype]
    planes = [
        torch.tensor([list(bytes.fromhex(text))], dtype=torch.uint8).view(
            TORCH_ELEMENT[plane.element]
        )
        for text, plane in zip(golden.planes["ordinary"], dtype.format.planes(16), strict=True)
    ]
    for out in (torch.float32, torch.float64):
        decoded = codec_for(dtype).decode(planes, usual_scale(dtype, golden.scale), out)
        assert same_values(decoded, torch.tensor([golden.values], dtype=out))


@every_row
@every_format
def test_golden_bytes_are_what_the_second_definition_says(dtype: KVDtype, name: str) -> None:
    golden = GOLDEN[dtype]
    row = ENCODE_ROW[dtype](ROWS[name], golden.scale)
    assert tuple(plane.hex() for plane in row.planes) == golden.planes[name]
    if name == "ordinary":
        assert row.values == golden.values


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@every_format
@pytest.mark.case("A44")
def test_planes_have_the_shapes_dtypes_and_bytes_that_the_plan_counts(
    dtype: KVDtype, head_dim: int
) -> None:
    fmt = dtype.format
    assert fmt.refuse_head_dim(head_dim) is None
    planes = codec_for(dtype).encode(rows(3, 2, head_dim), usual_scale(dtype))
    expected = fmt.planes(head_dim)
    assert [plane.dtype for plane in planes] == [TORCH_ELEMENT[p.element] for p in expected]
    assert [plane.shape for plane in planes] == [(3, 2, p.width) for p in expected]
    assert sum(p.numel() * p.element_size() for p in planes) == 6 * fmt.row_bytes(head_dim)
    decoded = codec_for(dtype).decode(planes, usual_scale(dtype), torch.float32)
    assert decoded.shape == (3, 2, head_dim)


@pytest.mark.parametrize("shape", [(2, 64), (0, 2, 64), (3, 2, 64), (5, 16, 2, 64), (0, 16, 2, 64)])
@every_format
def test_any_leading_shape_also_without_rows_gives_the_same_bytes(
    dtype: KVDtype, shape: tuple[int, ...]
) -> None:
    codec, scale = codec_for(dtype), usual_scale(dtype)
    x = rows(*shape)
    planes = codec.encode(x, scale)
    flat = codec.encode(x.reshape(-1, 2, 64), scale)
    assert [p.shape[:-1] for p in planes] == [shape[:-1]] * len(planes)
    assert [plane_bytes(p) for p in planes] == [plane_bytes(p) for p in flat]
    decoded = codec.decode(planes, scale, torch.float32)
    assert decoded.shape == shape
    assert same_values(decoded.reshape(-1, 2, 64), codec.decode(flat, scale, torch.float32))


@every_format
def test_strided_input_and_planes_read_like_contiguous_ones(dtype: KVDtype) -> None:
    codec, scale = codec_for(dtype), usual_scale(dtype)
    x = rows(2, 7, 64).transpose(0, 1)  # heads first in memory, as models produce it
    planes = codec.encode(x, scale)
    assert same_bytes(planes, codec.encode(x.contiguous(), scale))
    every_other = [torch.stack((p, p.clone().zero_()), dim=1)[:, 0] for p in planes]
    assert not all(p.is_contiguous() for p in every_other)
    decoded = codec.decode(every_other, scale, torch.float32)
    assert same_values(decoded, codec.decode(planes, scale, torch.float32))


@pytest.mark.parametrize("given", FLOAT_DTYPES, ids=str)
@every_format
def test_encoding_sees_the_numbers_of_any_float_dtype(dtype: KVDtype, given: torch.dtype) -> None:
    codec, scale = codec_for(dtype), usual_scale(dtype)
    x = (rows(4, 2, 64) * 3).to(given)
    assert same_bytes(codec.encode(x, scale), codec.encode(x.to(torch.float32), scale))


@pytest.mark.parametrize("wanted", FLOAT_DTYPES, ids=str)
@every_format
def test_decoding_into_any_float_dtype_rounds_the_float32_values(
    dtype: KVDtype, wanted: torch.dtype
) -> None:
    codec, scale = codec_for(dtype), usual_scale(dtype)
    planes = codec.encode(rows(4, 2, 64), scale)
    exact = codec.decode(planes, scale, torch.float32)
    assert same_values(codec.decode(planes, scale, wanted), exact.to(wanted))


@every_format
def test_encode_and_decode_write_to_nothing_they_were_given(dtype: KVDtype) -> None:
    codec, scale = codec_for(dtype), usual_scale(dtype)
    x = rows(4, 2, 64)
    kept = x.clone()
    planes = tuple(p.clone() for p in codec.encode(x, scale))
    before = tuple(p.clone() for p in planes)
    codec.decode(planes, scale, torch.float32)
    codec.decode(planes, scale, torch.float16)
    assert same_values(x, kept)
    assert same_bytes(planes, before)
    assert scale is None or scale.tolist() == [1.0]


@every_format
def test_zeroed_pages_decode_to_zeros(dtype: KVDtype) -> None:
    planes = [
        torch.zeros(3, 16, 2, p.width, dtype=TORCH_ELEMENT[p.element])
        for p in dtype.format.planes(64)
    ]
    decoded = codec_for(dtype).decode(planes, usual_scale(dtype, 0.37), torch.float32)
    assert same_values(decoded, torch.zeros(3, 16, 2, 64))


@every_format
def test_a_row_of_zeros_decodes_to_zeros(dtype: KVDtype) -> None:
    codec, scale = codec_for(dtype), usual_scale(dtype, 0.37)
    for zero in (0.0, -0.0):
        x = torch.full((1, 64), zero)
        assert codec.decode(codec.encode(x, scale), scale, torch.float32).tolist() == [[0.0] * 64]


@every_format
@pytest.mark.case("A46")
def test_magnitudes_above_the_bound_are_stored_as_the_bound(dtype: KVDtype) -> None:
    codec, scale = codec_for(dtype), usual_scale(dtype)
    if dtype.format.encoding in _NATIVE:
        x = torch.tensor([[2.0**101] * 64])
        decoded = codec.decode(codec.encode(x, scale), scale, torch.float32)
        largest = torch.finfo(TORCH_ELEMENT[dtype.format.element]).max
        assert decoded.tolist() == [[min(2.0**101, largest)] * 64]
        return
    bound = rows(1, 64)
    bound[0, ::8] = CLAMP
    for above in (CLAMP * 2, 3e38, math.inf):
        x = bound.clone()
        x[0, ::8] = above
        assert same_bytes(codec.encode(x, scale), codec.encode(bound, scale))


@every_format
def test_nan_stays_nan_and_its_bytes_do_not_depend_on_its_payload(dtype: KVDtype) -> None:
    codec, scale = codec_for(dtype), usual_scale(dtype)
    x = rows(2, 2, 64)
    found = []
    for bits in (0x7FC00000, 0x7FFFFFFF, 0x7F800001, -0x400000, -1):
        x[0, 1, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        planes = codec.encode(x, scale)
        found.append(planes)
        decoded = codec.decode(planes, scale, torch.float32)
        assert decoded[0, 1, 5].isnan()
        others = torch.ones(2, 2, dtype=torch.bool)
        others[0, 1] = False
        assert not decoded[others].isnan().any()
    if dtype.format.encoding not in _NATIVE:
        assert all(same_bytes(planes, found[0]) for planes in found)


@every_format
def test_a_row_with_nan_has_the_canonical_bytes(dtype: KVDtype) -> None:
    encoding, fmt = dtype.format.encoding, dtype.format
    if encoding in _NATIVE:
        return
    x = rows(1, 64)
    x[0, 5] = math.nan
    planes = codec_for(dtype).encode(x, usual_scale(dtype))
    if len(planes) == 1:
        canonical = {Encoding.E4M3FN: 0x7F, Encoding.E4M3FNUZ: 0x80, Encoding.E5M2: 0x7F}
        assert plane_bytes(planes[0])[5] == canonical[encoding]
        return
    codes, scales = planes
    if fmt.scale_encoding is Encoding.FLOAT32:
        assert plane_bytes(scales) == bytes.fromhex("0000c07f")
        assert set(codes.flatten().tolist()) == {0x7F if encoding is Encoding.E4M3FN else 0}
    elif fmt.scale_encoding is Encoding.FLOAT16:
        assert plane_bytes(scales)[:2] == bytes.fromhex("007e")
        assert set(codes.flatten().tolist()) == {0}
    elif fmt.scale_encoding is Encoding.SHORT:
        assert plane_bytes(scales) == bytes.fromhex("f0ff")
        assert set(codes.flatten().tolist()) == {0}
    else:
        assert plane_bytes(scales)[0] == 0x7F
        assert set(codes[0, : fmt.block // 2].tolist()) == {0}
        assert 0x7F not in plane_bytes(scales)[1:]


@every_format
def test_a_scale_per_head_is_that_scale_on_each_head(dtype: KVDtype) -> None:
    if not dtype.format.takes_outside_scale:
        return
    codec = codec_for(dtype)
    x, scale = rows(5, 3, 64), torch.tensor([0.03, 0.5, 7.0])
    planes = codec.encode(x, scale)
    decoded = codec.decode(planes, scale, torch.float32)
    for head in range(3):
        alone = codec.encode(x[:, head : head + 1], scale[head : head + 1])
        assert same_bytes([p[:, head : head + 1].contiguous() for p in planes], alone)
        one = codec.decode(alone, scale[head : head + 1], torch.float32)
        assert same_values(decoded[:, head : head + 1], one)
    equal = torch.tensor([0.5, 0.5, 0.5])
    assert same_bytes(codec.encode(x, equal), codec.encode(x, equal[:1]))


@every_format
def test_numbers_beside_a_tie_are_divided_as_ieee_says(dtype: KVDtype) -> None:
    """A product with a rounded reciprocal falls on the other side of some of these ties."""
    ties = torch.tensor(E4M3FN.magnitudes)
    ties = ((ties[1:] + ties[:-1]) / 2)[:112]
    for scale in (0.1, 0.37, 1 / 3, 7e-3, 1.7):
        outside = scale if dtype.format.takes_outside_scale else 1.0
        # nvfp4's block scale is amax / 6 / g, the others round x / scale.
        x = ties * (6.0 * scale if dtype.format.granularity is Granularity.BLOCK else scale)
        x = x.view(-1, 1) * torch.tensor([1.0] + [0.0] * 15)
        planes = codec_for(dtype).encode(x, usual_scale(dtype, outside))
        rows = [ENCODE_ROW[dtype](row, outside) for row in x.tolist()]
        for i in range(len(planes)):
            assert plane_bytes(planes[i]) == b"".join(row.planes[i] for row in rows)


@every_format
def test_every_format_is_told_apart_by_its_identity(dtype: KVDtype) -> None:
    same = [d for d in KVDtype if d.format.fingerprint == dtype.format.fingerprint]
    assert same == [dtype]
