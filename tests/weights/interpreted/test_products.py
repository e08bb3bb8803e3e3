"""Products with narrow weights against float64 products of the decoded bytes; interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from benchmarks.weight_products import FORMATS as MEASURED
from benchmarks.weight_products import SHAPES, wide_cuts

from kvant.weights import choose
from kvant.weights.blocks import read_blocks
from kvant.weights.codecs import (
    NarrowWeight,
    decode,
    encode,
    round_activations,
    round_groups,
    rows_of,
)
from kvant.weights.cuda import few_rows, wide_rows
from kvant.weights.format import (
    BLOCK_TYPES,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    MXFP4,
    NVFP4,
    Q4_1,
    Q4_K,
    Q6_K,
    BlockType,
    Scale,
    WeightFormat,
    int4_groups,
    int8_groups,
)
from kvant.weights.rounding import Rounding
from kvant.weights.triton.product import (
    Stripe,
    Tiles,
    decoded,
    of_blocks,
    of_copied_blocks,
    one,
    rows_decoded,
    tiled,
)
from tests.weights.test_blocks import blocks

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's bfloat16 is broken; compiled, float32 would be multiplied in another precision.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BOUND = 6e-3 if ON_GPU else 1e-5
pytestmark = [pytest.mark.gpu] if ON_GPU else []

FORMATS = [
    FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, INT8_CHANNEL, int8_groups(32, scale=Scale.BFLOAT16),
    int4_groups(32), int4_groups(64, zero_points=True), int4_groups(128, scale=Scale.FLOAT32),
    int4_groups(128, zero_points=True), MXFP4, NVFP4, int8_groups(32), Q4_1,
]  # fmt: skip


def _name(fmt: WeightFormat) -> str:
    return fmt.summary.replace(" ", "-")


@pytest.mark.parametrize("fmt", FORMATS, ids=_name)
@pytest.mark.parametrize(("tokens", "split"), [(1, 1), (17, 1), (5, 2)])
def test_tiles(fmt: WeightFormat, tokens: int, split: int) -> None:
    torch.manual_seed(0)
    weight = encode(torch.randn(150, 384, device=DEVICE), fmt)
    x, bias = torch.randn(tokens, 384, device=DEVICE), torch.randn(150, device=DEVICE)
    x, bias = x.to(DTYPE), bias.to(DTYPE)
    found = tiled(x, weight, bias, Tiles(16, 64, 128, split, 3, 4))
    expected = x.double() @ decode(weight, torch.float64).T + bias.double()
    assert (found.double() - expected).norm() < BOUND * expected.norm()


@pytest.mark.parametrize("fmt", FORMATS, ids=_name)
@pytest.mark.parametrize("block", [128, 256])
def test_one_row(fmt: WeightFormat, block: int) -> None:
    torch.manual_seed(0)
    weight = encode(torch.randn(37, 384, device=DEVICE), fmt)
    x = torch.randn(1, 384, device=DEVICE).to(DTYPE)
    found = one(x, weight, None, Stripe(2, block, 4))
    expected = x.double() @ decode(weight, torch.float64).T
    assert (found.double() - expected).norm() < BOUND * expected.norm()


@pytest.mark.parametrize("fmt", FORMATS, ids=_name)
def test_decoding_gives_the_definitions_numbers(fmt: WeightFormat) -> None:
    torch.manual_seed(0)
    weight = encode(torch.randn(37, 384, device=DEVICE), fmt)
    out = torch.empty(37, 384, device=DEVICE, dtype=DTYPE)
    assert torch.equal(decoded(weight, out), decode(weight, DTYPE))


@pytest.mark.parametrize("fmt", [int4_groups(32, zero_points=True), int8_groups(32)], ids=_name)
@pytest.mark.parametrize("tokens", [0, 1, 5, 17, 65, 300])
@pytest.mark.parametrize("alike", [False, True])
def test_inputs_in_another_order_are_multiplied_by_their_own_numbers(
    fmt: WeightFormat, tokens: int, alike: bool
) -> None:
    torch.manual_seed(0)
    weight = encode(torch.randn(150, 384, device=DEVICE), fmt)
    weight = replace(weight, order=torch.randperm(384, device=DEVICE).to(torch.int32))
    x, bias = torch.randn(tokens, 384, device=DEVICE), torch.randn(150, device=DEVICE)
    x, bias = x.to(DTYPE), bias.to(DTYPE)
    found = (choose.multiply_alike if alike else choose.multiply)(x, weight, bias)
    expected = x.double() @ decode(weight, torch.float64).T + bias.double()
    assert (found.double() - expected).norm() <= BOUND * expected.norm()


def _superblocks(fmt: WeightFormat, rows: int) -> NarrowWeight:
    """Rows behind others of a joined weight: [rows, 512]."""
    torch.manual_seed(0)
    return rows_of(encode(torch.randn(rows + 16, 512, device=DEVICE), fmt), 16, rows)


@pytest.mark.parametrize("fmt", [Q4_K, Q6_K], ids=_name)
@pytest.mark.parametrize(("tokens", "split"), [(1, 1), (17, 1), (5, 2)])
def test_tiles_of_superblocks(fmt: WeightFormat, tokens: int, split: int) -> None:
    weight = _superblocks(fmt, 70)
    x, bias = torch.randn(tokens, 512, device=DEVICE), torch.randn(70, device=DEVICE)
    x, bias = x.to(DTYPE), bias.to(DTYPE)
    found = tiled(x, weight, bias, Tiles(16, 64, 128, split, 3, 4))
    expected = x.double() @ decode(weight, torch.float64).T + bias.double()
    assert (found.double() - expected).norm() < BOUND * expected.norm()


@pytest.mark.parametrize("fmt", [Q4_K, Q6_K], ids=_name)
@pytest.mark.parametrize("block", [128, 1024])
def test_one_row_of_superblocks(fmt: WeightFormat, block: int) -> None:
    weight = _superblocks(fmt, 37)
    x, bias = torch.randn(1, 512, device=DEVICE).to(DTYPE), torch.randn(37, device=DEVICE).to(DTYPE)
    found = one(x, weight, bias, Stripe(2, block, 4))
    expected = x.double() @ decode(weight, torch.float64).T + bias.double()
    assert (found.double() - expected).norm() < BOUND * expected.norm()


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
def test_blocks_are_decoded_as_the_definition_says(kind: BlockType) -> None:
    """Any bytes, whole and by rows."""
    given = torch.from_numpy(blocks(kind, 37, 512)).to(DEVICE)
    weight = read_blocks(kind, given, 512)
    out = torch.empty(37, 512, device=DEVICE, dtype=DTYPE)
    assert torch.equal(decoded(weight, out), decode(weight, DTYPE))
    rows = torch.tensor([3, 36, 3, 0], device=DEVICE)
    assert torch.equal(rows_decoded(weight, rows, DTYPE), decode(weight, DTYPE)[rows])


@pytest.mark.parametrize("tokens", [5, 70])
def test_codes_times_blocks(tokens: int) -> None:
    torch.manual_seed(0)
    weight = encode(torch.randn(150, 256, device=DEVICE), FP8_BLOCK)
    codes, scales = round_groups(torch.randn(tokens, 256, device=DEVICE), 128)
    codes = codes.view(torch.float8_e4m3fn)
    out = torch.empty(tokens, 150, device=DEVICE, dtype=DTYPE)
    found = of_blocks(codes, scales, weight, out)
    x = codes.double() * scales.double().repeat_interleave(128, 1)
    expected = x @ decode(weight, torch.float64).T
    assert (found.double() - expected).norm() < BOUND * expected.norm()


# Rows that are not whole blocks; on a GPU also an odd number of blocks, and more tiles than programs.
@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(5, 160), (70, 256)] + [(1100, 1920), (2000, 2944), (9000, 150)] * ON_GPU,
)
def test_codes_times_copied_blocks(tokens: int, rows: int) -> None:
    torch.manual_seed(0)
    weight = encode(torch.randn(rows, 256, device=DEVICE), FP8_BLOCK)
    codes, scales = round_groups(torch.randn(tokens, 256, device=DEVICE), 128)
    codes = codes.view(torch.float8_e4m3fn)
    out = torch.full((tokens, rows), torch.nan, device=DEVICE, dtype=DTYPE)
    found = of_copied_blocks(codes, scales, weight, out)
    x = codes.double() * scales.double().repeat_interleave(128, 1)
    expected = x @ decode(weight, torch.float64).T
    assert (found.double() - expected).norm() < BOUND * expected.norm()


@pytest.mark.skipif(not ON_GPU, reason="the interpreter encodes e4m3 otherwise")
@pytest.mark.parametrize("rounding", [Rounding(), Rounding(128), Rounding(scale=torch.ones(1))])
def test_numbers_that_overflowed_stay_visible(rounding: Rounding) -> None:
    x = torch.randn(3, 384, device=DEVICE).to(DTYPE)
    x[0, 7], x[1, 200] = torch.nan, torch.inf
    given = Rounding(rounding.group, None if rounding.scale is None else rounding.scale.to(DEVICE))
    codes = choose.round_activations(x, given).codes.float()
    assert codes[0, 7].isnan()
    assert codes[1, 200].isnan() or rounding.scale is not None  # saturates under a given scale
    assert codes[2].isfinite().all()


@pytest.mark.skipif(not ON_GPU, reason="the interpreter encodes e4m3 otherwise")
@pytest.mark.parametrize(
    ("group", "scale"), [(0, None), (128, None), (0, 0.037), (0, 1.0), (0, 2.0**-7)]
)
def test_rounding_is_the_definition(group: int, scale: float | None) -> None:
    x = (torch.randn(70, 384, device=DEVICE) * torch.logspace(-3, 3, 384, device=DEVICE)).to(DTYPE)
    x[3] = 0
    rounding = Rounding(group, None if scale is None else torch.tensor([scale], device=DEVICE))
    found, expected = choose.round_activations(x, rounding), round_activations(x, rounding)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("scale", [None, 1 / 64], ids=["by row", "by a stored scale"])
def test_tensor_cores_add_in_fewer_bits_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, scale: float | None
) -> None:
    """torch's product stands in: a CPU has no such sums."""
    weight = encode(torch.randn(32, 64), FP8_CHANNEL if scale is None else FP8_TENSOR)
    stored = None if scale is None else torch.full((1,), scale)
    asked = []

    def stand_in(x: torch.Tensor, *_: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append(options["use_fast_accum"])
        return x.new_zeros(len(x), 32, dtype=options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    for fast in (False, True):
        rows = Rounding(scale=stored, fast_sums=fast).empty(
            torch.zeros(70, 64, dtype=torch.bfloat16)
        )
        choose.multiply_rounded(rows, weight, None)
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        (FP8_CHANNEL, {1: "few_rows.cu", 2: "wide_rows.cu", 64: "wide_rows.cu", 65: "tiles in Triton"}),
        (int4_groups(32), {1: "few_rows.cu", 9: "few_rows.cu", 64: "few_rows.cu"}),
        (MXFP4, {1: "few_rows.cu", 9: "few_rows.cu", 33: "shared_rows.cu"}),
        (NVFP4, {1: "one row in Triton", 2: "tiles in Triton", 256: "tiles in Triton"}),
        (FP8_BLOCK, {256: "tiles in Triton", 257: "decoded, then torch"}),
    ],
)  # fmt: skip
def test_the_kernel_follows_from_format_and_rows(
    fmt: WeightFormat, expected: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Hopper GPU whose CUDA kernels passed their check."""
    monkeypatch.setattr(choose, "few_serves", few_rows.reads)
    found = {
        rows: choose.kernel_for(fmt, rows, 4096, 4096, torch.bfloat16).value for rows in expected
    }
    assert found == expected


@pytest.mark.parametrize("fmt", [FP8_CHANNEL, INT8_CHANNEL], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bias", [False, True])
def test_a_large_weight_is_decoded_in_parts(
    fmt: WeightFormat, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = encode(torch.randn(100, 64, device=DEVICE), fmt)
    x = torch.randn(7, 64, device=DEVICE, dtype=DTYPE)
    added = torch.randn(100, device=DEVICE, dtype=DTYPE) if bias else None
    rows = []

    def counted(part: NarrowWeight, out: torch.Tensor) -> torch.Tensor:
        rows.append(part.rows)
        return decoded(part, out)

    monkeypatch.setattr(choose, "decoded", counted)
    whole = choose._by_decoding(x, weight, added)
    monkeypatch.setattr(choose, "MOST_DECODED", 64 * 33)
    parts = choose._by_decoding(x, weight, added)
    assert rows == [100, 33, 33, 33, 1]
    assert (parts.float() - whole.float()).norm() < BOUND * whole.float().norm()


@pytest.mark.parametrize("name", MEASURED)
def test_cuts_to_measure_have_work_for_every_program_and_fit(name: str) -> None:
    fmt = MEASURED[name]
    for tokens, (rows, columns) in product((16, 64), SHAPES.values()):
        cuts = list(wide_cuts(fmt, tokens, (rows, columns)))
        assert len({cut.rows for cut in cuts}) == 3
        for cut in cuts:
            assert cut.resident * wide_rows.threads(cut) <= 2048
            assert cut.parts * cut.deep * few_rows.BLOCK <= columns
