"""GGUF's blocks equal the gguf package's dequantisation, bit for bit, for any bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvant.errors import BadCheckpoint
from kvant.weights.blocks import check_blocks, read_blocks
from kvant.weights.codecs import decode, encode, join, rows_of
from kvant.weights.format import BLOCK_TYPES, BlockType

KINDS = list(BLOCK_TYPES.values())
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block has float16 numbers."""


def blocks(kind: BlockType, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Random bytes, and random finite scales of both signs, a few of them zero."""
    rng = np.random.default_rng(seed)
    count = columns // kind.inputs
    made = rng.integers(0, 256, (rows, count, kind.num_bytes), dtype=np.uint8)
    for at in HALVES[kind.name]:
        scales = rng.standard_normal((rows, count, 1)) * (rng.random((rows, count, 1)) > 0.05)
        made[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return made.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_are_the_gguf_packages_bit_for_bit(kind: BlockType) -> None:
    given = blocks(kind, 7, 768)
    expected = dequantize(given, GGMLQuantizationType[kind.name])
    found = decode(read_blocks(kind, torch.from_numpy(given), 768)).numpy()
    np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_parts_of_joined_weights_are_the_weights(kind: BlockType) -> None:
    parts = [
        read_blocks(kind, torch.from_numpy(blocks(kind, rows, 512, rows)), 512) for rows in (3, 5)
    ]
    whole = join(parts)
    assert torch.equal(decode(whole), torch.cat([decode(part) for part in parts]))
    assert torch.equal(decode(rows_of(whole, 3, 5)), decode(parts[1]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_bytes_are_the_formats_arithmetic(kind: BlockType) -> None:
    weight = read_blocks(kind, torch.from_numpy(blocks(kind, 4, 512)), 512)
    assert weight.num_bytes == kind.format.matrix_bytes(4, 512)
    in_file = 4 * kind.row_bytes(512)
    assert in_file <= weight.num_bytes <= 1.03 * in_file  # 6-bit scales take a byte each


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_refused_by_name(kind: BlockType, bad: float) -> None:
    for at in HALVES[kind.name]:
        given = blocks(kind, 4, 512)
        check_blocks("w", kind, torch.from_numpy(given))
        place = (512 // kind.inputs - 1) * kind.num_bytes + at
        given[2, place : place + 2] = np.array([bad], np.float16).view(np.uint8)
        with pytest.raises(BadCheckpoint, match=f"w holds {kind.name} blocks"):
            check_blocks("w", kind, torch.from_numpy(given))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rounding_errs_by_about_half_a_step(kind: BlockType) -> None:
    numbers = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    numbers[3] = 0
    made = encode(numbers, kind.format)
    error = (decode(made) - numbers).view(-1, 32).abs().amax(-1)
    largest = numbers.view(-1, 32).abs().amax(-1)
    steps = {8: 127, 6: 31, 4: 7}[kind.format.code.bits]
    assert (
        error <= largest / steps * 0.55 + (0.05 * largest if kind.format.superblock else 0)
    ).all()
    assert made.num_bytes == kind.format.matrix_bytes(8, 512)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_what_the_gguf_package_wrote_is_read(name: str) -> None:
    numbers = np.random.default_rng(1).standard_normal((6, 96)).astype(np.float32)
    given = quantize(numbers, GGMLQuantizationType[name])
    found = decode(read_blocks(BLOCK_TYPES[name], torch.from_numpy(given), 96)).numpy()
    np.testing.assert_array_equal(found, dequantize(given, GGMLQuantizationType[name]))
