"""GGUF's blocks: splits a weight's rows, as a file stores them, into codes, scales and offsets.

Layouts are ggml's (ggml-common.h, ggml-quants.c). `decode` of the result equals the gguf package's
dequantisation bit for bit.

    Q8_0    32 inputs: float16 d, int8 codes
    Q4_0    32 inputs: float16 d, 16 bytes; byte j has input j in its low half, input j + 16 in its high half
    Q4_1    32 inputs: float16 d and offset, 16 bytes likewise
    Q4_K    256 inputs: float16 factors of scales and of offsets, 12 bytes of 6-bit scales and offsets,
            128 bytes; of 64 inputs, byte j has input j in its low half, input j + 32 in its high half
    Q6_K    256 inputs: 128 bytes of low halves, 64 bytes of the upper 2 bits, 16 int8 scales, float16 factor
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.errors import BadCheckpoint
from kvant.weights.codecs import NarrowWeight, pack_nibbles, pack_six
from kvant.weights.format import BlockType, Code


def read_blocks(kind: BlockType, blocks: Tensor, columns: int) -> NarrowWeight:
    """Returns the weight in `blocks`, uint8 [rows, bytes of a row]. Every number keeps its value."""
    fmt, rows = kind.format, blocks.shape[0]
    parts = blocks.contiguous().view(rows, columns // kind.inputs, kind.num_bytes)
    if fmt.superblock:
        return _read_superblocks(kind, parts, columns)
    scales = _halves(parts[..., :2])
    if fmt.code is Code.INT8:
        codes = parts[..., 2:].reshape(rows, columns)
        return NarrowWeight(fmt, rows, columns, codes, scales)
    first = 4 if fmt.offsets else 2
    codes = parts[..., first:].reshape(rows, columns // 2)
    offsets = _halves(parts[..., 2:4]) if fmt.offsets else None
    return NarrowWeight(fmt, rows, columns, codes, scales, offsets=offsets)


def check_blocks(name: str, kind: BlockType, blocks: Tensor) -> None:
    """Raises BadCheckpoint, naming the tensor, if a scale or factor in its blocks is not finite.

    blocks: uint8 [rows, bytes of a row]. Zeros and negative scales are usual in GGUF files.
    """
    rows = blocks.shape[0]
    parts = blocks.contiguous().view(rows, -1, kind.num_bytes)
    places = {"Q6_K": (208,), "Q4_K": (0, 2), "Q4_1": (0, 2)}.get(kind.name, (0,))
    for at in places:
        halves = parts[..., at : at + 2].view(torch.float16)
        if not bool(torch.isfinite(halves).all()):
            raise BadCheckpoint(
                f"{name} holds {kind.name} blocks whose scale is NaN or infinite",
                why="their numbers would be NaN",
            )


def _read_superblocks(kind: BlockType, parts: Tensor, columns: int) -> NarrowWeight:
    fmt, rows = kind.format, parts.shape[0]
    if fmt.code is Code.INT6:
        low, high = (
            parts[..., :128].view(rows, -1, 2, 64),
            parts[..., 128:192].view(rows, -1, 2, 32),
        )
        nibbles = torch.stack(
            (low[..., :32], low[..., 32:], low[..., :32] >> 4, low[..., 32:] >> 4), 3
        )
        upper = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 3)
        codes = ((nibbles & 15) | (upper << 4)).reshape(rows, columns)
        scales = parts[..., 192:208].reshape(rows, -1).view(torch.int8).t().contiguous()
        factors = _halves(parts[..., 208:210])[None]
        return NarrowWeight(fmt, rows, columns, pack_six(codes), scales, factors=factors)
    bytes_ = parts[..., 16:].view(rows, -1, 4, 32)
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), 3).reshape(rows, columns)
    packed = parts[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), -1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), -1)
    return NarrowWeight(
        fmt, rows, columns, pack_nibbles(codes, fmt.columns), scales.reshape(rows, -1).t().contiguous(),
        offsets=offsets.reshape(rows, -1).t().contiguous(),
        factors=torch.stack((_halves(parts[..., :2]), _halves(parts[..., 2:4]))),
    )  # fmt: skip


def _halves(bytes_: Tensor) -> Tensor:
    """Returns bytes, uint8 [rows, blocks, 2], as float16 [blocks, rows]."""
    return bytes_.view(torch.float16).squeeze(-1).t().contiguous()
