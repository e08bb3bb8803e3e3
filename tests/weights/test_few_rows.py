"""CUDA products of few rows against float64 products of the decoded bytes, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvant.weights.codecs import decode, encode
from kvant.weights.cuda import few_rows, shared_rows, wide_rows
from kvant.weights.cuda.few_rows import MOST_ROWS, Act, Kind, Pairs, Warps, token_tiles
from kvant.weights.cuda.shared_rows import Shares
from kvant.weights.format import (
    FP8_BLOCK,
    FP8_CHANNEL,
    INT8_CHANNEL,
    MXFP4,
    NVFP4,
    Q4_1,
    Q4_K,
    Q6_K,
    Scale,
    WeightFormat,
    int4_groups,
    int8_groups,
)
from tests.weights.blocks import in_rows

FORMATS = [
    FP8_CHANNEL, FP8_BLOCK, INT8_CHANNEL, int4_groups(128), int4_groups(128, zero_points=True),
    int4_groups(128, scale=Scale.BFLOAT16), int4_groups(32), int4_groups(64), int8_groups(32), Q4_1,
]  # fmt: skip


def test_programs_take_tokens_in_eights() -> None:
    assert [token_tiles(n) for n in (1, 8, 9, 16, 17, 32, 33, 64, 65)] == [
        1,
        1,
        2,
        2,
        4,
        4,
        8,
        8,
        8,
    ]
    assert MOST_ROWS == 64


def test_formats_that_the_kernel_does_not_read_are_left_to_others() -> None:
    left = (
        (NVFP4, 128), (int4_groups(32, zero_points=True), 128), (FP8_CHANNEL, 96), (FP8_BLOCK, 192),
        (int4_groups(64, scale=Scale.FLOAT32), 128), (Q4_K, 128),
    )  # fmt: skip
    for fmt, columns in left:
        assert not few_rows.reads(fmt, 128, columns, torch.bfloat16)
    assert not few_rows.reads(FP8_CHANNEL, 120, 128, torch.bfloat16)
    assert few_rows.reads(MXFP4, 128, 96, torch.bfloat16)
    assert not few_rows.reads(MXFP4, 128, 96, torch.float16)


def test_only_products_of_bare_codes_have_room_for_blocks_sums() -> None:
    def size(fmt: WeightFormat, kind: Kind) -> int:
        macros = few_rows.defines(fmt, 1024, 1, torch.bfloat16, Warps(1, 2, 2), kind)
        return few_rows.shared_bytes(macros)

    fmt = int4_groups(128)
    one, alone = Kind(one=True), Kind(one=True, pairs=Pairs.ALONE)
    assert size(fmt, one) - size(fmt, alone) == 1024 // 128 * 2 * 4
    assert size(MXFP4, one) == size(MXFP4, alone)
    assert size(int4_groups(32), one) == size(int4_groups(32), alone)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.summary.replace(" ", "-"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows(fmt: WeightFormat, dtype: torch.dtype) -> None:
    if not few_rows.serves(fmt, 144, 640):
        pytest.skip("this GPU has other kernels")
    torch.manual_seed(0)
    weight = encode(torch.randn(144, 640, device="cuda"), fmt)
    numbers = decode(weight, torch.float64)
    bias = torch.randn(144, device="cuda").to(dtype)
    for tokens in (1, 8, 9, 33, 65):
        x = torch.randn(tokens, 640, device="cuda").to(dtype)
        expected = x.double() @ numbers.T
        for cut in (Warps(1, 8, 1), Warps(2, 4, 3), Warps(4, 4, 2)):
            found = few_rows.multiply(x, weight, None, cut).double()
            assert (found - expected).norm() < 6e-3 * expected.norm()
        found = few_rows.multiply(x, weight, bias, Warps(1, 4, 1)).double()
        assert (found - expected - bias.double()).norm() < 6e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [Q4_K, Q6_K], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_of_superblocks(fmt: WeightFormat, dtype: torch.dtype) -> None:
    if not few_rows.serves(fmt, 144, 768):
        pytest.skip("this GPU has other kernels")
    torch.manual_seed(0)
    weight = encode(torch.randn(144, 768, device="cuda"), fmt)
    numbers = decode(weight, torch.float64)
    for tokens in (1, 8, 9, 33, 65):
        x = torch.randn(tokens, 768, device="cuda").to(dtype)
        expected = x.double() @ numbers.T
        for cut in (Warps(1, 8, 1), Warps(2, 3, 3)):
            found = few_rows.multiply(x, weight, None, cut).double()
            assert (found - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [*FORMATS, MXFP4], ids=lambda fmt: fmt.summary.replace(" ", "-"))
def test_rows_that_warps_share(fmt: WeightFormat) -> None:
    if not few_rows.serves(fmt, 256, 1280) or few_rows.is_grouped(fmt):
        pytest.skip("other kernels take it")
    torch.manual_seed(0)
    weight = encode(torch.randn(256, 1280, device="cuda") * 0.03, fmt)
    numbers = decode(weight, torch.float64)
    for tokens in (9, 32, 64):
        x = torch.randn(tokens, 1280, device="cuda").bfloat16()
        expected = x.double() @ numbers.T
        for cut in (Shares(2, 4, 3, 3), Shares(1, 2, 2, 1)):
            found = shared_rows.multiply(x, weight, None, cut)
            assert (found.double() - expected).norm() < 6e-3 * expected.norm()
            for _ in range(5):
                assert torch.equal(shared_rows.multiply(x, weight, None, cut), found)
        gate, up = expected.chunk(2, -1)
        made = shared_rows.multiply(x, weight, None, Shares(2, 4, 3, 3), Act.SILU).double()
        wanted = torch.nn.functional.silu(gate) * up
        assert (made - wanted).norm() < 1.5e-2 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_subnormal_weights_count_beside_numbers_of_any_size(size: float) -> None:
    if not few_rows.serves(FP8_CHANNEL, 256, 1280):
        pytest.skip("this GPU has other kernels")
    torch.manual_seed(0)
    weight = encode(torch.randn(256, 1280, device="cuda"), FP8_CHANNEL)
    codes = torch.randint(0, 16, (256, 1280), device="cuda")
    weight.codes.view(torch.uint8).copy_((codes % 8 + codes // 8 * 128).to(torch.uint8))
    x = (torch.randn(32, 1280, device="cuda") * size).bfloat16()
    expected = x.double() @ decode(weight, torch.float64).T
    found = wide_rows.multiply(x, weight, None, wide_rows.Cut(1, 4, 2, 4, 2)).rows.double()
    assert (found - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 9, 32])
@pytest.mark.parametrize("cut", [wide_rows.Cut(1, 8, 2, 4, 3), wide_rows.Cut(1, 4, 2, 4, 1, 2, 2)])
def test_rows_in_blocks_give_the_bits_of_rows(tokens: int, cut: wide_rows.Cut) -> None:
    """A chain of products that fold norms, as a decoder has it, run again and again."""
    if not few_rows.serves(FP8_CHANNEL, 512, 1280):
        pytest.skip("this GPU has other kernels")
    torch.manual_seed(0)
    shapes = {"output": (1280, 2048), "up": (4096, 1280), "down": (1280, 2048)}
    weights = {
        name: encode(torch.randn(*shape, device="cuda") * 0.03, FP8_CHANNEL)
        for name, shape in shapes.items()
    }
    norm, residual = torch.randn(1280, device="cuda"), torch.randn(tokens, 1280, device="cuda")
    summed = wide_rows.Beside(residual=residual.bfloat16(), norm_weight=norm.bfloat16())
    x = torch.randn(tokens, 2048, device="cuda").bfloat16()

    def chain(*, blocks: bool) -> tuple[Tensor, wide_rows.Found]:
        added = wide_rows.Around(added=True, weighted=True, makes_blocks=blocks)
        before = wide_rows.multiply(x, weights["output"], None, cut, added, summed)
        assert before.weighted is not None
        gated = wide_rows.Around(norm=True, act=Act.SILU, takes_blocks=blocks, makes_blocks=blocks)
        behind = wide_rows.Beside(squares=before.squares, eps=1e-6)
        inner = wide_rows.multiply(before.weighted, weights["up"], None, cut, gated, behind).out
        added = wide_rows.Around(
            added=True, weighted=True, takes_blocks=blocks, makes_blocks=blocks
        )
        found = wide_rows.multiply(inner, weights["down"], None, cut, added, summed)
        assert found.weighted is not None
        weighted = found.weighted
        return in_rows(weighted) if isinstance(weighted, wide_rows.Blocks) else weighted, found

    expected, rows = chain(blocks=False)
    for _ in range(20):
        weighted, found = chain(blocks=True)
        assert torch.equal(weighted, expected)
        assert torch.equal(found.rows, rows.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.summary.replace(" ", "-"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_by_wide_instructions(fmt: WeightFormat, dtype: torch.dtype) -> None:
    served = few_rows.serves(fmt, 512, 1280) and wide_rows.reads(fmt, 512, 1280, dtype)
    if not served:
        pytest.skip("other kernels take it")
    torch.manual_seed(0)
    weight = encode(torch.randn(512, 1280, device="cuda") * 0.03, fmt)
    numbers = decode(weight, torch.float64)
    norm, eps = torch.randn(512, device="cuda").to(dtype), 1e-6
    summed = wide_rows.Around(added=True, weighted=True)
    for tokens in (2, 9, 32, 64):
        x = torch.randn(tokens, 1280, device="cuda").to(dtype)
        residual = torch.randn(tokens, 512, device="cuda").to(dtype)
        expected = x.double() @ numbers.T
        for cut in (wide_rows.Cut(1, 8, 2, 4, 3), wide_rows.Cut(1, 4, 3, 2, 1, deep=4)):
            found = wide_rows.multiply(x, weight, None, cut).rows
            assert (found.double() - expected).norm() < 6e-3 * expected.norm()
            beside = wide_rows.Beside(residual=residual, norm_weight=norm)
            total = wide_rows.multiply(x, weight, None, cut, summed, beside)
            wanted = expected + residual.double()
            assert (total.rows.double() - wanted).norm() < 6e-3 * wanted.norm()
            assert total.squares is not None
            squares = total.rows.double().square().sum(1)
            torch.testing.assert_close(total.squares.double().sum(0)[:tokens], squares)
            for _ in range(5):
                assert torch.equal(wide_rows.multiply(x, weight, None, cut).rows, found)
            behind = wide_rows.Beside(squares=torch.rand(3, 64, device="cuda") * 400, eps=eps)
            gated = wide_rows.Around(norm=True, act=Act.SILU)
            made = wide_rows.multiply(x, weight, None, cut, gated, behind).rows.double()
            assert behind.squares is not None
            mean = behind.squares.double().sum(0)[:tokens] / 1280
            gate, up = (expected * torch.rsqrt(mean + eps)[:, None]).chunk(2, -1)
            wanted = torch.nn.functional.silu(gate) * up
            assert (made - wanted).norm() < 1.5e-2 * wanted.norm()
