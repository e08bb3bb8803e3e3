"""The CUDA kernel of few rows, compiled for this CPU, against float64 products of the decoded bytes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.models.fused.routing import Routing, Scoring, route
from kvant.weights.codecs import NarrowStack, NarrowWeight, decode, encode, encode_stack
from kvant.weights.cuda import wide_rows
from kvant.weights.cuda.few_rows import NOTHING, PLAIN, Act, Beside, Kind, Pairs, Routed, Warps
from kvant.weights.cuda.shared_rows import Shares
from kvant.weights.cuda.wide_rows import Around, Blocks, Cut
from kvant.weights.format import (
    FP8_BLOCK,
    FP8_CHANNEL,
    INT8_CHANNEL,
    MXFP4,
    Q4_1,
    Q4_K,
    Q6_K,
    Scale,
    WeightFormat,
    int4_groups,
    int8_groups,
)
from tests.weights.blocks import in_blocks, in_rows
from tests.weights.host.run import multiply, multiply_shared, multiply_wide

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
INT4 = int4_groups(128)
ZEROS = int4_groups(128, zero_points=True)
BOUND = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
slow = pytest.mark.slow


def close(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error < BOUND[found.dtype], f"{float(error):.1e}"


def exact(weight: NarrowWeight) -> Tensor:
    return decode(weight, torch.float64)


def product(x: Tensor, weight: NarrowWeight, bias: Tensor, *, gated: bool) -> Tensor:
    """x @ weight.T + bias in float64 [tokens, rows]. gated: silu(first half of rows) * second half."""
    y = x.double() @ exact(weight).T + bias.double()
    return silu_gated(y) if gated else y


def silu_gated(both: Tensor) -> Tensor:
    """silu(gates) * ups [.., rows / 2] of both [.., rows], gates first."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def subnormal(rows: int, columns: int) -> NarrowWeight:
    """A weight of fp8 whose codes are all subnormal numbers or zeros."""
    weight = encode(torch.randn(rows, columns), FP8_CHANNEL)
    codes = torch.arange(rows * columns).reshape(rows, columns) * 7 % 16
    weight.codes.view(torch.uint8).copy_((codes % 8 + codes // 8 * 128).to(torch.uint8))
    return weight


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("fmt", "tokens", "cut"),
    [
        (FP8_CHANNEL, 5, Warps(1, 2, 2)),
        pytest.param(FP8_CHANNEL, 19, Warps(2, 3, 1), marks=slow),
        pytest.param(FP8_BLOCK, 40, Warps(4, 1, 3), marks=slow),
        pytest.param(INT8_CHANNEL, 3, Warps(1, 4, 2), marks=slow),
        pytest.param(INT4, 17, Warps(1, 2, 2), marks=slow),
        (ZEROS, 9, Warps(2, 2, 1)),
        pytest.param(MXFP4, 9, Warps(2, 1, 2), marks=slow),
        pytest.param(MXFP4, 20, Warps(1, 2, 2), marks=slow),
        (int4_groups(32), 9, Warps(2, 2, 2)),
        pytest.param(int4_groups(64), 5, Warps(4, 1, 2), marks=slow),
        (int8_groups(32), 3, Warps(1, 2, 2)),
        (Q4_1, 9, Warps(2, 2, 2)),
        (Q4_K, 9, Warps(2, 2, 2)),
        pytest.param(Q4_K, 33, Warps(4, 1, 2), marks=slow),
        (Q6_K, 9, Warps(2, 2, 2)),
        pytest.param(Q6_K, 33, Warps(4, 2, 2), marks=slow),
        pytest.param(int8_groups(64, scale=Scale.BFLOAT16), 20, Warps(2, 2, 1), marks=slow),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_rows(
    fmt: WeightFormat, tokens: int, cut: Warps, dtype: torch.dtype, tmp_path: Path
) -> None:
    if fmt == MXFP4 and dtype is torch.float16:
        pytest.skip("not read")
    columns = 2 * fmt.superblock or (416 if fmt.columns == 32 else 640)
    weight = encode(torch.randn(144, columns), fmt)
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(144).to(dtype)
    found = multiply(tmp_path, x, weight, bias, cut, PLAIN, NOTHING)
    close(found, product(x, weight, bias, gated=False))


@pytest.mark.parametrize(
    ("fmt", "tokens", "cut"),
    [
        (FP8_CHANNEL, 13, Shares(2, 2, 3, 2)),
        pytest.param(FP8_CHANNEL, 32, Shares(1, 4, 2, 1), marks=slow),
        pytest.param(FP8_BLOCK, 40, Shares(2, 2, 3, 3), marks=slow),
        pytest.param(INT8_CHANNEL, 10, Shares(4, 1, 2, 5), marks=slow),
        pytest.param(INT4, 17, Shares(1, 2, 4, 2), marks=slow),
        (ZEROS, 9, Shares(2, 2, 3, 2)),
        pytest.param(MXFP4, 20, Shares(2, 1, 3, 2), marks=slow),
    ],
)
@pytest.mark.parametrize("gated", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_rows_that_warps_share(
    fmt: WeightFormat, tokens: int, cut: Shares, gated: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    if fmt == MXFP4 and dtype is torch.float16:
        pytest.skip("not read")
    rows, columns = (256, 640) if gated and fmt == FP8_BLOCK else (144, 640)
    weight = encode(torch.randn(rows, columns) * columns**-0.5, fmt)
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
    found = multiply_shared(tmp_path, x, weight, bias, cut, Act.SILU if gated else None)
    close(found, product(x, weight, bias, gated=gated))


@pytest.mark.parametrize(
    ("fmt", "tokens", "cut"),
    [
        (FP8_CHANNEL, 13, Cut(1, 4, 3, 2, 2)),
        (ZEROS, 33, Cut(1, 4, 2, 3, 1, deep=4)),
        pytest.param(INT4, 5, Cut(1, 4, 3, 2, 1, deep=1), marks=slow),
        pytest.param(FP8_BLOCK, 20, Cut(2, 4, 2, 2, 1), marks=slow),
        pytest.param(INT8_CHANNEL, 20, Cut(1, 8, 3, 2, 3), marks=slow),
        pytest.param(int8_groups(128), 9, Cut(1, 4, 3, 2, 2), marks=slow),
        pytest.param(FP8_CHANNEL, 8, Cut(4, 4, 2, 2, 1, deep=1), marks=slow),
    ],
)
@pytest.mark.parametrize("gated", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_rows_by_wide_instructions(
    fmt: WeightFormat, tokens: int, cut: Cut, gated: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    rows, columns = (256, 640) if gated and fmt == FP8_BLOCK else (144, 640)
    weight = encode(torch.randn(rows, columns) * columns**-0.5, fmt)
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
    around = Around(act=Act.SILU if gated else None)
    found = multiply_wide(tmp_path, x, weight, bias, cut, around, wide_rows.NOTHING).rows
    close(found, product(x, weight, bias, gated=gated))


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_subnormal_weights_count_beside_numbers_of_any_size(size: float, tmp_path: Path) -> None:
    weight = subnormal(128, 640)
    x = (torch.randn(9, 640) * size).bfloat16()
    cut = Cut(1, 4, 2, 2, 2)
    found = multiply_wide(tmp_path, x, weight, None, cut, Around(), wide_rows.NOTHING).rows
    close(found, x.double() @ exact(weight).T)


@pytest.mark.parametrize(
    ("fmt", "tokens", "plus"),
    [
        (FP8_CHANNEL, 11, False),
        pytest.param(ZEROS, 33, True, marks=slow),
        pytest.param(INT8_CHANNEL, 3, True, marks=slow),
    ],
)
def test_products_of_several_rows_fold_what_lies_between_them(
    fmt: WeightFormat, tokens: int, plus: bool, tmp_path: Path
) -> None:
    """The sum with the residual, and gates and ups of its norm."""
    dtype, eps = torch.bfloat16, 1e-6
    first, both = (
        encode(torch.randn(rows, columns) * columns**-0.5, fmt)
        for rows, columns in ((256, 640), (144, 256))
    )
    x, residual = torch.randn(tokens, 640).to(dtype), torch.randn(tokens, 256).to(dtype)
    norm = torch.randn(256).to(dtype)
    around = Around(added=True, weighted=True, plus=plus)
    beside = wide_rows.Beside(residual=residual, norm_weight=norm)
    total = multiply_wide(tmp_path, x, first, None, Cut(1, 4, 3, 2, 2), around, beside)
    close(total.rows, x.double() @ exact(first).T + residual.double())
    assert total.squares is not None
    assert isinstance(total.weighted, Tensor)
    wide, factor = total.rows.double(), norm.double() + plus
    close(total.weighted, wide * factor)
    torch.testing.assert_close(total.squares.double().sum(0)[:tokens], wide.square().sum(1))
    around = Around(norm=True, act=Act.SILU)
    beside = wide_rows.Beside(squares=total.squares, eps=eps)
    inner = multiply_wide(tmp_path, total.weighted, both, None, Cut(1, 4, 2, 2, 1), around, beside)
    normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps) * factor
    close(inner.rows, silu_gated(normed @ exact(both).T))


@pytest.mark.parametrize("tokens", [11, pytest.param(33, marks=slow)])
@pytest.mark.parametrize("deep", [1, 2])
def test_rows_in_blocks_give_the_bits_of_rows(tokens: int, deep: int, tmp_path: Path) -> None:
    """Each product stores blocks as the next one reads them: the sum with the residual, gates and ups."""
    fmt, cut = FP8_CHANNEL, Cut(1, 4, 3, 2, 2, deep=deep)
    first, both = (
        encode(torch.randn(rows, columns) * columns**-0.5, fmt)
        for rows, columns in ((256, 640), (256, 256))
    )
    x, residual = torch.randn(tokens, 640).bfloat16(), torch.randn(tokens, 256).bfloat16()
    around = Around(added=True, weighted=True)
    beside = wide_rows.Beside(residual=residual, norm_weight=torch.randn(256).bfloat16())
    rows = multiply_wide(tmp_path, x, first, None, cut, around, beside)
    around = replace(around, takes_blocks=True, makes_blocks=True)
    blocks = multiply_wide(tmp_path, in_blocks(x), first, None, cut, around, beside)
    assert torch.equal(blocks.rows, rows.rows)
    assert blocks.squares is not None
    assert rows.squares is not None
    assert torch.equal(blocks.squares[:, :tokens], rows.squares[:, :tokens])
    assert isinstance(blocks.weighted, Blocks)
    assert isinstance(rows.weighted, Tensor)
    assert torch.equal(in_rows(blocks.weighted), rows.weighted)
    around = Around(norm=True, act=Act.SILU)
    beside = wide_rows.Beside(squares=rows.squares, eps=1e-6)
    inner = multiply_wide(tmp_path, rows.weighted, both, None, cut, around, beside)
    around = replace(around, takes_blocks=True, makes_blocks=True)
    stored = multiply_wide(tmp_path, blocks.weighted, both, None, cut, around, beside).out
    assert isinstance(stored, Blocks)
    assert torch.equal(in_rows(stored), inner.rows)


@pytest.mark.parametrize(
    ("fmt", "columns"),
    [
        (FP8_CHANNEL, 576), pytest.param(FP8_BLOCK, 640, marks=slow),
        pytest.param(INT8_CHANNEL, 640, marks=slow),
        pytest.param(INT4, 640, marks=slow), (ZEROS, 640), (MXFP4, 416), (int4_groups(32), 416),
        pytest.param(int4_groups(64), 320, marks=slow), (int8_groups(32), 416),
        pytest.param(int8_groups(64), 320, marks=slow), (Q4_1, 416), (Q4_K, 512), (Q6_K, 512),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "size", [1.0, pytest.param(1e6, marks=slow), pytest.param(1e-6, marks=slow)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_one_row_is_normalised_activated_and_added(
    fmt: WeightFormat, columns: int, size: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Gates and ups of a normalised row, then the product that is added to the residual."""
    if dtype is torch.float16 and (fmt == MXFP4 or size != 1.0):
        pytest.skip("not read, or not in float16")
    weight = encode(torch.randn(2 * 128, columns) * columns**-0.5, fmt)
    x, norm = (torch.randn(1, columns) * size).to(dtype), torch.randn(columns).to(dtype)
    kind = Kind(one=True, norm=True, gated=True)
    beside = Beside(norm_weight=norm, eps=1e-12)
    found = multiply(tmp_path, x, weight, None, Warps(2, 2, 2), kind, beside)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean() + 1e-12) * norm.double()
    close(found, silu_gated(normed @ exact(weight).T))

    down = encode(torch.randn(48, columns) * columns**-0.5, fmt)
    residual = torch.randn(1, 48).to(dtype) * size
    kind = Kind(one=True, added=True)
    found = multiply(tmp_path, x, down, None, Warps(1, 3, 1), kind, Beside(residual=residual))
    close(found, wide @ exact(down).T + residual.double())


def stack(count: int, rows: int, columns: int, fmt: WeightFormat) -> NarrowStack:
    return encode_stack(torch.randn(count, rows, columns) * columns**-0.5, fmt)


def of_pairs(x: Tensor, weights: NarrowStack, bias: Tensor | None, ids: Tensor) -> Tensor:
    """Products [pairs, rows] of x [pairs, columns] with the pairs' experts."""
    found = []
    for row, expert in zip(x.double(), ids.flatten().tolist(), strict=True):
        y = row @ exact(weights.one(expert)).T
        found.append(y if bias is None else y + bias[expert].double())
    return torch.stack(found)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize(
    ("fmt", "columns", "alternating", "top_k", "tokens"),
    [
        (MXFP4, 416, True, 2, 1),
        pytest.param(FP8_BLOCK, 256, False, 3, 2, marks=slow),
        pytest.param(FP8_CHANNEL, 320, False, 2, 1, marks=slow),
        pytest.param(ZEROS, 256, True, 2, 1, marks=slow),
        pytest.param(int4_groups(32), 288, True, 2, 1, marks=slow),
    ],
)
def test_single_tokens_have_the_sum_of_their_experts(
    fmt: WeightFormat, columns: int, alternating: bool, top_k: int, tokens: int, tmp_path: Path
) -> None:
    count, width, dtype = 4, 128, torch.bfloat16
    first, second = (
        stack(count, 2 * width, columns, fmt),
        stack(count, columns // 16 * 16, width, fmt),
    )
    if fmt == FP8_BLOCK:
        second = stack(count, 256, width, fmt)
    rows = second.shape[1]
    biases = torch.randn(count, 2 * width).to(dtype), torch.randn(count, rows).to(dtype)
    x, residual = torch.randn(tokens, columns).to(dtype), torch.randn(tokens, rows).to(dtype)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).to(torch.int32)
    shares = torch.rand(tokens, top_k)
    beside = Beside(ids=ids, shares=shares, top_k=top_k, limit=1.0, alpha=1.702)
    kind = Kind(one=True, gated=True, alternating=alternating, act=Act.CLAMPED, pairs=Pairs.ALONE)
    h = multiply(tmp_path, x, first.whole, biases[0], Warps(1, 2, 2), kind, beside, experts=count)
    both = of_pairs(x.repeat_interleave(top_k, 0), first, biases[0], ids)
    gate, up = (both[:, ::2], both[:, 1::2]) if alternating else both.chunk(2, -1)
    close(h, clamped(gate, up))

    kind = Kind(one=True, added=True, pairs=Pairs.SUMMED, top_k=top_k)
    beside = Beside(ids=ids, shares=shares, top_k=top_k, residual=residual)
    found = multiply(
        tmp_path, h, second.whole, biases[1], Warps(1, 2, 1), kind, beside, experts=count
    )
    results = of_pairs(h, second, biases[1], ids).view(tokens, top_k, rows)
    close(found, (results * shares[..., None].double()).sum(1) + residual.double())


@pytest.mark.parametrize(
    ("fmt", "routing"),
    [
        (FP8_BLOCK, Routing(40, 3, renormalise=True, rounded=True)),
        pytest.param(FP8_BLOCK, Routing(33, 2, renormalise=False, scale=2.5), marks=slow),
        pytest.param(MXFP4, Routing(8, 4, Scoring.TOP_K_THEN_SOFTMAX, rounded=True), marks=slow),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_programs_choose_the_experts_of_their_token(
    fmt: WeightFormat, routing: Routing, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Equal logits, negative ones and zeros of both signs among them; the second token's have a NaN."""
    if fmt == MXFP4 and dtype is torch.float16:
        pytest.skip("float16 has no products with mxfp4")
    count, width, columns, top_k = routing.num_experts, 128, 256, routing.top_k
    first, second = stack(count, 2 * width, columns, fmt), stack(count, columns, width, fmt)
    logits = torch.randint(-3, 3, (2, count)).to(dtype) / 2
    logits[0, 1], logits[0, 2], logits[0, 5], logits[0, 6] = -0.0, 0.0, 7.0, 7.0
    logits[1, 4] = torch.nan
    x, norm = torch.randn(2, columns).to(dtype) * 3, torch.rand(columns).to(dtype)
    begins = routing.scoring is Scoring.SOFTMAX_THEN_TOP_K
    routed = Routed(count, begins, routing.renormalise, routing.rounded)
    beside = Beside(
        logits=logits, factor=routing.scale, top_k=top_k, norm_weight=norm, eps=1e-6, residual=x,
    )  # fmt: skip
    kind = Kind(one=True, norm=True, gated=True, pairs=Pairs.ALONE, routed=routed)
    h = multiply(tmp_path, x, first.whole, None, Warps(1, 2, 2), kind, beside, experts=count)
    shares, _ = route(logits[:1], routing)  # of equal logits, torch takes any
    ids = torch.argsort(logits[0].float(), descending=True, stable=True)[:top_k]
    normed = x[0].double() * torch.rsqrt(x[0].double().pow(2).mean() + 1e-6) * norm.double()
    right = silu_gated(of_pairs(normed.expand(top_k, -1), first, None, ids))
    close(h[:top_k], right)

    kind = Kind(one=True, added=True, pairs=Pairs.SUMMED, top_k=top_k, routed=routed)
    beside = replace(beside, residual=x / 8)  # small beside the sums
    found = multiply(tmp_path, h, second.whole, None, Warps(1, 2, 1), kind, beside, experts=count)
    results = of_pairs(h[:top_k], second, None, ids)
    close(found[0], (results * shares[0, :, None].double()).sum(0) + x[0].double() / 8)
    assert found[1].isnan().all()


@pytest.mark.parametrize(
    ("fmt", "columns", "alternating", "tokens", "cut"),
    [
        (MXFP4, 352, True, 7, Warps(2, 2, 2)),
        pytest.param(FP8_BLOCK, 256, False, 30, Warps(2, 2, 2), marks=slow),
        pytest.param(FP8_CHANNEL, 320, False, 9, Warps(1, 2, 1), marks=slow),
        pytest.param(ZEROS, 256, False, 9, Warps(2, 2, 1), marks=slow),
    ],
)
def test_listed_pairs_are_multiplied_with_their_experts(
    fmt: WeightFormat, columns: int, alternating: bool, tokens: int, cut: Warps, tmp_path: Path
) -> None:
    """One expert has no pairs, another has those of all tokens."""
    count, top_k, width, dtype = 3, 2, 128, torch.bfloat16
    ids = torch.tensor([[0, 2]] * tokens, dtype=torch.int32)
    shares = torch.rand(tokens, top_k)
    lists = torch.zeros(count, tokens, dtype=torch.int32)
    lists[0], lists[2] = torch.arange(tokens) * 2, torch.arange(tokens) * 2 + 1
    counts = torch.tensor([tokens, 0, tokens], dtype=torch.int32)
    x = torch.randn(tokens, columns).to(dtype)
    first, second = stack(count, 2 * width, columns, fmt), stack(count, 128, width, fmt)
    beside = Beside(ids=ids, shares=shares, lists=lists, counts=counts, top_k=top_k)
    kind = Kind(gated=True, alternating=alternating, pairs=Pairs.LISTED)
    h = multiply(tmp_path, x, first.whole, None, cut, kind, beside, experts=count)
    both = of_pairs(x.repeat_interleave(top_k, 0), first, None, ids)
    gate, up = (both[:, ::2], both[:, 1::2]) if alternating else both.chunk(2, -1)
    close(h, F.silu(gate) * up)

    bias = torch.randn(count, 128).to(dtype)
    kind = Kind(pairs=Pairs.LISTED, share=True)
    found = multiply(tmp_path, h, second.whole, bias, cut, kind, beside, experts=count)
    close(found, of_pairs(h, second, bias, ids) * shares.view(-1, 1).double())


@pytest.mark.parametrize("tokens", [8, pytest.param(12, marks=slow)])
def test_listed_experts_have_scales_of_any_size(tokens: int, tmp_path: Path) -> None:
    """Scales of 2 ** -17 to 2 ** 12; the largest are alone in their blocks, or beside small ones."""
    count, columns = 2, 352
    weights = stack(count, 64, columns, MXFP4)
    scales = weights.whole.scales
    scales.copy_(torch.randint(110, 128, scales.shape))
    scales[4:8] = torch.randint(110, 140, scales[4:8].shape)
    scales[8:, ::7] = 139
    lists = torch.arange(tokens, dtype=torch.int32).repeat(count, 1)
    beside = Beside(
        ids=torch.zeros(tokens, 1, dtype=torch.int32), shares=torch.rand(tokens, 1), lists=lists,
        counts=torch.tensor([0, tokens], dtype=torch.int32),
    )  # fmt: skip
    x = torch.randn(tokens, columns).bfloat16()
    kind, cut = Kind(pairs=Pairs.LISTED), Warps(2, 2, 2)
    found = multiply(tmp_path, x, weights.whole, None, cut, kind, beside, experts=count)
    expected = x.double() @ exact(weights.one(1)).T
    assert ((found.double() - expected).norm(dim=0) < 6e-3 * expected.norm(dim=0)).all()
