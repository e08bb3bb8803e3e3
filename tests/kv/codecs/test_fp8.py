"""fp8 with scales from outside, and with scales of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from tests.kv.codecs.comparison import plane_bytes, same_bytes
from tests.kv.codecs.oracle import E4M3FN, E4M3FNUZ, E5M2, ENCODE_ROW
from tests.strategies import outside_scale, usual_rows

few = settings(deadline=None, max_examples=100)
KINDS = {
    KVDtype.FP8_E4M3: E4M3FN,
    KVDtype.FP8_E4M3FNUZ: E4M3FNUZ,
    KVDtype.FP8_E5M2: E5M2,
}


@few
@given(st.sampled_from(list(KINDS)).flatmap(lambda d: st.tuples(st.just(d), outside_scale(d, 1))))
def test_finite_codes_survive_decoding_and_encoding_for_any_scale(
    case: tuple[KVDtype, torch.Tensor | None],
) -> None:
    dtype, scale = case
    kind = KINDS[dtype]
    finite = [code for code in range(256) if kind.number(code) is not None]
    codes = torch.tensor([finite], dtype=torch.uint8)
    codec = codec_for(dtype)
    decoded = codec.decode((codes,), scale, torch.float32)
    assert same_bytes(codec.encode(decoded, scale), (codes,))


@pytest.mark.case("A54")
def test_fnuz_with_twice_the_scale_stores_the_numbers_and_bytes_of_e4m3() -> None:
    x = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(3)) * 40
    scale = torch.tensor([0.37, 1.9])
    ocp, fnuz = codec_for(KVDtype.FP8_E4M3), codec_for(KVDtype.FP8_E4M3FNUZ)
    ocp_codes, fnuz_codes = ocp.encode(x, scale)[0], fnuz.encode(x, scale * 2)[0]
    inside = (x.abs() <= 448 * scale.view(-1, 1)) & (ocp_codes != 0x80)
    assert inside.float().mean() > 0.9
    assert torch.equal(ocp_codes[inside], fnuz_codes[inside])
    assert not (fnuz_codes == 0x80).any()  # NaN there, negative zero in OCP's encoding
    read = [
        ocp.decode((ocp_codes,), scale, torch.float32),
        fnuz.decode((fnuz_codes,), scale * 2, torch.float32),
    ]
    assert torch.equal(read[0][inside], read[1][inside])


@pytest.mark.case("A54")
def test_the_same_code_means_half_as_much_in_fnuz() -> None:
    codes = torch.tensor([[c for c in range(256) if c & 0x7F != 0x7F and c != 0x80]]).to(
        torch.uint8
    )
    one = torch.ones(1)
    ocp = codec_for(KVDtype.FP8_E4M3).decode((codes,), one, torch.float32)
    fnuz = codec_for(KVDtype.FP8_E4M3FNUZ).decode((codes,), one, torch.float32)
    assert torch.equal(ocp, fnuz * 2)


@pytest.mark.case("A55")
def test_fp8_e5m2_stores_e5m2_and_takes_no_scale() -> None:
    x = torch.tensor([[1.0, 1000.0, 60000.0, 2.0**-16]])
    codec = codec_for(KVDtype.FP8_E5M2)
    (codes,) = codec.encode(x, None)
    assert codes.tolist() == [[0x3C, 0x64, 0x7B, 0x01]]
    assert codec.decode((codes,), None, torch.float32).tolist() == [
        [1.0, 1024.0, 57344.0, 2.0**-16]
    ]
    assert not KVDtype.FP8_E5M2.format.takes_outside_scale


@pytest.mark.parametrize(
    "dtype", [KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD], ids=str
)
@few
@given(usual_rows(64))
def test_encoding_decoded_rows_again_moves_no_code(dtype: KVDtype, x: torch.Tensor) -> None:
    """The largest element has the largest code, so its row finds the same scale but for one ulp."""
    codec = codec_for(dtype)
    codes, scales = codec.encode(x, None)
    decoded = codec.decode((codes, scales), None, torch.float32)
    again, scales_again = codec.encode(decoded, None)
    # -0.0 is no two's complement number, and rows hold no negative zero otherwise.
    assert torch.equal(codes, again)
    ulps = scales.view(torch.int32) - scales_again.view(torch.int32)
    assert ulps.abs().max() <= 1


@pytest.mark.parametrize(
    ("dtype", "largest", "ties"),
    [
        (KVDtype.FP8_PER_TOKEN_HEAD, 448.0, [1.0625, 9.5, 13.5, 27.0, 54.0, 108.0, 232.0, 400.0]),
        (KVDtype.INT8_PER_TOKEN_HEAD, 127.0, [n + 0.5 for n in range(126)]),
    ],
    ids=str,
)
def test_numbers_beside_a_tie_are_divided_by_the_row_s_scale_as_ieee_says(
    dtype: KVDtype, largest: float, ties: list[float]
) -> None:
    scales = torch.linspace(0.01, 2.0, 150).view(-1, 1)
    x = torch.tensor([largest, *ties]) * scales
    planes = codec_for(dtype).encode(x, None)
    rows = [ENCODE_ROW[dtype](row, 1.0) for row in x.tolist()]
    for i in range(2):
        assert plane_bytes(planes[i]) == b"".join(row.planes[i] for row in rows)


def test_all_255_codes_of_int8_are_stored_and_come_back() -> None:
    numbers = torch.arange(-127, 128, dtype=torch.float32)
    codec = codec_for(KVDtype.INT8_PER_TOKEN_HEAD)
    planes = codec.encode(numbers[None] * 0.25, None)
    assert planes[0].tolist() == [[n & 0xFF for n in range(-127, 128)]]
    assert planes[1].tolist() == [[0.25]]
    assert codec.decode(planes, None, torch.float32).tolist() == [(numbers * 0.25).tolist()]
