"""Values beyond what a format holds are counted, and only those."""

from __future__ import annotations

import math

import pytest
import torch

from kvant.kv.codecs import Codec, codec_for
from kvant.kv.codecs.codebook import CENTROIDS_3BIT, CENTROIDS_4BIT
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Encoding
from kvant.kv.saturation_counter import PROMPT_ROWS, SAMPLE_EVERY, SaturationCounter
from tests.kv.codecs.golden import read_golden_codes

HEADS, DIM = 2, 16
LARGEST = {d: d.format.largest for d in KVDtype if d.format.largest is not None}


def test_formats_that_end_are_these() -> None:
    """A format that ends and does not say so would saturate unseen."""
    assert {str(dtype): most for dtype, most in LARGEST.items()} == {
        "float16": 65504.0,
        "fp8_e4m3": 448.0,
        "fp8_e4m3fnuz": 240.0,
        "fp8_e5m2": 57344.0,
        "nvfp4": 6.0 * 448.0,
        "turboquant_k8": 448.0,
    }


@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda e: e.value)
def test_every_encoding_says_the_largest_code_that_its_codecs_write(encoding: Encoding) -> None:
    found = [d for d in KVDtype if encoding in (d.format.encoding, d.format.scale_encoding)]
    assert found, "no format has this encoding"
    assert encoding.largest > 0
    for name, codes in read_golden_codes().items():
        if name is encoding:
            assert max(filter(math.isfinite, codes)) == encoding.largest
    if encoding in (Encoding.NORMAL4, Encoding.NORMAL3):
        centroids = CENTROIDS_4BIT if encoding is Encoding.NORMAL4 else CENTROIDS_3BIT
        assert max(centroids) == encoding.largest


def planted(largest: float, scale: float) -> torch.Tensor:
    """Eight tokens, as large as can be held; the second and the last have one value beyond."""
    x = torch.full((8, HEADS, DIM), largest * scale)
    x[1, 0, 3] *= -1.001
    x[7, 1, 5] *= 1e6
    return x


def count(x: torch.Tensor, dtype: KVDtype, scale: torch.Tensor | None, slots: list[int]) -> int:
    counts = torch.zeros(2, dtype=torch.int64)
    made = SaturationCounter(counts, (LARGEST.get(dtype), None))
    made.sample((x, x), (scale, None), torch.tensor(slots))
    assert counts[1] == 0
    return int(counts[0])


@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
def test_what_is_beyond_the_largest_is_what_the_codec_brings_down(dtype: KVDtype) -> None:
    """The table's numbers are the codecs': at the largest nothing is lost, beyond it something is."""
    scale = torch.tensor([0.5]) if dtype.format.takes_outside_scale else None
    largest = LARGEST[dtype] * (1.0 if scale is None else 0.5)
    codec = codec_for(dtype)
    x = torch.tensor([largest, 1.5 * largest]).repeat_interleave(16).view(2, 1, 16)
    back = codec.decode(codec.encode(x, scale), scale, torch.float32)
    assert back.unique().tolist() == [largest]


@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
def test_planted_outliers_are_counted_where_rows_are_written(dtype: KVDtype) -> None:
    scale = torch.tensor([0.25]) if dtype.format.takes_outside_scale else None
    x = planted(LARGEST[dtype], 1.0 if scale is None else 0.25)
    assert count(x, dtype, scale, list(range(8))) == 2
    assert count(x, dtype, scale, [0, 1, 2, 3, 4, 5, 6, -1]) == 1


def test_each_head_is_held_to_its_own_scale() -> None:
    x = torch.full((4, HEADS, DIM), 448.0)
    assert count(x, KVDtype.FP8_E4M3, torch.tensor([1.0, 0.9]), [0, 1, 2, 3]) == 4 * DIM


def test_narrow_inputs_are_compared_exactly() -> None:
    x = torch.full((4, HEADS, DIM), 65504.0).to(torch.bfloat16)  # 65536
    assert count(x, KVDtype.FLOAT16, None, [0, 1, 2, 3]) == x.numel()


def test_single_tokens_are_looked_at_now_and_then() -> None:
    counts = torch.zeros(2, dtype=torch.int64)
    made = SaturationCounter(counts, (448.0, 448.0))
    x = torch.full((1, HEADS, DIM), 1000.0)
    for _ in range(2 * SAMPLE_EVERY):
        made.sample((x, x), (None, None), torch.tensor([3]))
    assert counts.tolist() == [2 * x.numel()] * 2


def test_a_scale_that_is_not_what_it_was_counts_as_it_is_now() -> None:
    """One that went wrong is put back by the audit; the count must not go on with the wrong one."""
    counts = torch.zeros(2, dtype=torch.int64)
    made = SaturationCounter(counts, (448.0, None))
    x = torch.full((PROMPT_ROWS, HEADS, DIM), 1000.0)
    scale = torch.tensor([100.0])
    for expected, value in ((0, 100.0), (x.numel(), 1.0), (x.numel(), 100.0)):
        scale.fill_(value)
        made.sample((x, x), (scale, None), torch.arange(PROMPT_ROWS))
        assert counts.tolist() == [expected, 0]


def test_other_formats_hold_large_rows_as_well_as_small_ones() -> None:
    """In proportion: what they lose they lose to rounding, not to an end of their range."""
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    large = 4096.0
    for dtype in set(KVDtype) - set(LARGEST):
        codec = codec_for(dtype)

        def back(rows: torch.Tensor, codec: Codec = codec) -> torch.Tensor:
            return codec.decode(codec.encode(rows, None), None, torch.float32)

        torch.testing.assert_close(back(large * x) / large, back(x), rtol=1e-3, atol=1e-3)
