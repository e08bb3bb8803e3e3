"""Properties that hold for all numbers: hypothesis looks for numbers that break them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvant.kv.codecs import CLAMP, codec_for
from kvant.kv.dtype import KVDtype
from tests.kv.codecs.comparison import plane_bytes, same_bytes
from tests.kv.codecs.oracle import ENCODE_ROW
from tests.strategies import FLOAT_DTYPES, finite_rows, head_dims, kv_dtypes, outside_scale

HEADS = 2
Case = tuple[KVDtype, Tensor, Tensor | None]


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 4) -> Case:
    """A format, finite float32 rows [rows, HEADS, head_dim], and a scale if it takes one."""
    dtype = draw(kv_dtypes())
    head_dim = draw(head_dims(dtype))
    heads = [draw(finite_rows(head_dim, max_rows)) for _ in range(HEADS)]
    length = min(len(rows) for rows in heads)
    x = torch.stack([rows[:length] for rows in heads], dim=1)
    return dtype, x, draw(outside_scale(dtype, HEADS))


few = settings(deadline=None, max_examples=150)


@few
@given(cases(), st.sampled_from(FLOAT_DTYPES), st.sampled_from(FLOAT_DTYPES))
@pytest.mark.case("A46")
def test_finite_input_never_decodes_to_nan_or_inf(
    case: Case, given_as: torch.dtype, wanted: torch.dtype
) -> None:
    dtype, x, scale = case
    if given_as is torch.float64:
        x = x.to(given_as) * 2.0**500
    else:
        x = x.clamp(-torch.finfo(given_as).max, torch.finfo(given_as).max).to(given_as)
    planes = codec_for(dtype).encode(x, scale)
    decoded = codec_for(dtype).decode(planes, scale, wanted)
    assert decoded.isfinite().all()


@few
@given(cases())
def test_bytes_and_values_are_those_of_the_second_definition(case: Case) -> None:
    dtype, x, scale = case
    planes = codec_for(dtype).encode(x, scale)
    decoded = codec_for(dtype).decode(planes, scale, torch.float64)
    for t in range(len(x)):
        for head in range(HEADS):
            outside = 1.0 if scale is None else float(scale.expand(HEADS)[head])
            row = ENCODE_ROW[dtype](x[t, head].tolist(), outside)
            assert tuple(plane_bytes(p[t, head]) for p in planes) == row.planes
            assert decoded[t, head].tolist() == row.values


@few
@given(cases(), st.data())
def test_bytes_of_a_row_depend_on_that_row_alone(case: Case, data: st.DataObject) -> None:
    dtype, x, scale = case
    codec = codec_for(dtype)
    t, head = data.draw(st.integers(0, len(x) - 1)), data.draw(st.integers(0, HEADS - 1))
    alone_scale = None if scale is None else scale.expand(HEADS)[head : head + 1]
    alone = codec.encode(x[t : t + 1, head : head + 1], alone_scale)
    among = [p[t : t + 1, head : head + 1].contiguous() for p in codec.encode(x, scale)]
    assert same_bytes(among, alone)


def _half_ulp(significant_bits: int, smallest_step: float) -> Callable[[Tensor], Tensor]:
    """Largest rounding error of a float with that many bits, subnormal steps included."""
    return lambda x: (x * 2.0**-significant_bits).clamp(min=smallest_step / 2)


def _past(x: Tensor, largest: float | Tensor) -> Tensor:
    """How far saturation moves x."""
    return (x.abs() - largest).clamp(min=0)


def _float(bits: int, step: float, largest: float) -> Callable[[Tensor, Tensor], Tensor]:
    error = _half_ulp(bits, step)
    return lambda x, scale: scale * error(x.abs() / scale) + _past(x, scale * largest)


def _row_absmax(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def _fp8_per_token_head(x: Tensor, scale: Tensor) -> Tensor:
    own: Tensor = (_row_absmax(x) / 448).clamp(min=2.0**-126)
    return own * _half_ulp(4, 2.0**-9)(x.abs() / own)


def _int8_per_token_head(x: Tensor, scale: Tensor) -> Tensor:
    return ((_row_absmax(x) / 127).clamp(min=2.0**-126) / 2).expand_as(x)


def _int4_per_token_head(x: Tensor, scale: Tensor) -> Tensor:
    """Half a step in rotated space, 0.004 more at the ends of the range for the scale's rounding.

    Undoing the rotation averages errors of a block with signs, so the bound holds per element.
    """
    span, sums = _rotated_span(x)
    return ((span / 15).clamp(min=2.0**-126) * 0.504 + sums).expand_as(x)


def _int4_short(x: Tensor, scale: Tensor) -> Tensor:
    """The same with 15 / 128 for the scale's rounding; scales saturate at both ends."""
    span, sums = _rotated_span(x)
    largest = 15 * 2.0**22 * (1 + 62 / 64)
    cut = torch.where(span > largest, span, torch.zeros_like(span))
    return ((span / 15).clamp(min=2.0**-41) * 0.62 + cut + sums).expand_as(x)


def _rotated_span(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest less smallest number of rotated rows, and what float32 butterflies may be off: [.., 1]."""
    block = x.shape[-1] & -x.shape[-1]
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    y = x.reshape(-1, block) @ torch.tensor(signs, dtype=torch.float64)
    y = y.view(x.shape)
    span = y.amax(-1, keepdim=True).clamp(min=0) - y.amin(-1, keepdim=True).clamp(max=0)
    sums = (
        2.0**-20 * math.sqrt(block) * x.square().sum(-1, keepdim=True).sqrt()
    )  # float32 butterflies
    return span, sums


def _nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    """Half of the widest gap of e2m1, or what a scale rounded down (at most by 1/16) cuts off.

    Block scales below 2^-6 have steps of 2^-9, and none is below that; above 448 they saturate.
    """
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    wanted = _row_absmax(blocks) / 6 / scale.unsqueeze(-1)
    off = _half_ulp(4, 2.0**-9)(wanted).clamp(max=2.0**-9 * 448 * 16)
    tiny = wanted < 2.0**-9
    off = torch.where(tiny, torch.full_like(wanted, 2.0**-9), off)
    given = (wanted + off).clamp(max=448.0)
    cut = _past(blocks, 6 * (wanted - off).clamp(0.0, 448.0) * scale.unsqueeze(-1))
    step = given * scale.unsqueeze(-1)
    whole = torch.where(tiny, blocks.abs(), cut)
    return torch.maximum(step.expand_as(blocks), whole).flatten(-2)


def _turboquant_k(x: Tensor, scale: Tensor) -> Tensor:
    """No direction is worse than a right angle to the nearest, whose length is that of x or less.

    Each number of the codebook has the sign of what it stands for; float16 scales stop at 65504,
    and below have steps of 2^-24.
    """
    length = x.square().sum(-1, keepdim=True).sqrt()
    steps = 2.0**-25 * 2.74 * math.sqrt(x.shape[-1])
    return (math.sqrt(2) * (1 + 2.0**-10) * length + steps).expand_as(x)


def _normal2(x: Tensor, scale: Tensor) -> Tensor:
    """The decoded row is longest, sqrt(D + 8) / 3 times the row, if rotation leaves a single number."""
    row = x.square().sum(-1, keepdim=True).sqrt()
    longest = math.sqrt(x.shape[-1] + 8) / 3
    return (_turboquant_k(x, scale)[..., :1] + longest * row * (1 + 2.0**-10)).expand_as(x)


def _turboquant_v(bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Half a step; what float16 makes of minimum and scale, over all steps; what saturates."""
    most = (1 << bits) - 1

    def bound(x: Tensor, scale: Tensor) -> Tensor:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        half = _half_ulp(11, 2.0**-24)
        off = half(low.abs().clamp(max=65504.0)) + _past(low, 65504.0)
        span = high - low + off
        step = (span / most).clamp(max=65504.0)
        over = (span - most * 65504.0).clamp(min=0)
        return (step * (0.5 + 2.0**-10) + most * half(step) + off + over).expand_as(x)

    return bound


ERROR_BOUND: dict[KVDtype, Callable[[Tensor, Tensor], Tensor]] = {
    KVDtype.FLOAT32: lambda x, scale: torch.zeros_like(x),
    KVDtype.FLOAT16: _float(11, 2.0**-24, 65504.0),
    KVDtype.BFLOAT16: _float(8, 2.0**-133, float(torch.finfo(torch.bfloat16).max)),
    KVDtype.FP8_E4M3: _float(4, 2.0**-9, 448.0),
    KVDtype.FP8_E4M3FNUZ: _float(4, 2.0**-10, 240.0),
    KVDtype.FP8_E5M2: _float(3, 2.0**-16, 57344.0),
    KVDtype.FP8_PER_TOKEN_HEAD: _fp8_per_token_head,
    KVDtype.INT8_PER_TOKEN_HEAD: _int8_per_token_head,
    KVDtype.INT4_PER_TOKEN_HEAD: _int4_per_token_head,
    KVDtype.INT4_FEEDBACK: _int4_per_token_head,  # without matrices
    KVDtype.INT4_SHORT: _int4_short,
    KVDtype.INT4_SHORT_FEEDBACK: _int4_short,  # without matrices
    KVDtype.NORMAL2: _normal2,
    KVDtype.NVFP4: _nvfp4,
    KVDtype.TURBOQUANT_K8: _float(4, 2.0**-9, 448.0),
    KVDtype.TURBOQUANT_K4: _turboquant_k,
    KVDtype.TURBOQUANT_K3: _turboquant_k,
    KVDtype.TURBOQUANT_V4: _turboquant_v(4),
    KVDtype.TURBOQUANT_V3: _turboquant_v(3),
}
"""Per format: rows in float64 and the scale [.., 1] -> each element's largest error."""

CLAMPED = {dtype for dtype in KVDtype if dtype.format.codec != "native"}


def test_every_format_states_its_error_bound() -> None:
    missing = [dtype for dtype in KVDtype if dtype not in ERROR_BOUND]
    assert not missing, f"add the error bound of {missing} to ERROR_BOUND in {__file__}"


@few
@given(cases())
def test_error_stays_within_the_format_s_bound(case: Case) -> None:
    dtype, x, scale = case
    planes = codec_for(dtype).encode(x, scale)
    decoded = codec_for(dtype).decode(planes, scale, torch.float64)
    exact = x.to(torch.float64)
    if dtype in CLAMPED:
        exact = exact.clamp(-CLAMP, CLAMP)
    outside = torch.ones(1, 1) if scale is None else scale.reshape(-1, 1)
    bound = ERROR_BOUND[dtype](exact, outside.to(torch.float64))
    if dtype in CLAMPED:
        bound = bound * (1 + 2.0**-20) + 2.0**-148  # float32 divisions and products
    assert ((decoded - exact).abs() <= bound).all()


@few
@given(st.integers(0, 2**31), st.sampled_from([64, 96, 128]), st.sampled_from([1e-3, 1.0, 300.0]))
def test_a_row_of_normal2_keeps_its_length_along_itself(
    seed: int, head_dim: int, size: float
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    x = size * torch.randn(3, HEADS, head_dim, generator=numbers)
    codec = codec_for(KVDtype.NORMAL2)
    decoded = codec.decode(codec.encode(x, None), None, torch.float64)
    along, length = (x.double() * decoded).sum(-1), x.double().square().sum(-1)
    torch.testing.assert_close(along, length, rtol=2.0**-10, atol=0.0)
