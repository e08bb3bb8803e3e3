"""Reads rows of a narrow embedding as float32, exactly as the format's codec decodes them."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from kvant.kernels.cpu.block import Block, address, block_of
from kvant.kernels.cpu.compiled import compiled_worker
from kvant.kernels.cpu.vector import fetch_add, load_f16, load_i64, load_u8, store_f32
from kvant.models.cpu.info import GROUP
from kvant.models.cpu.layout import Embed, Kind, Operation, StepFields
from kvant.models.cpu.run import new_step, run_function
from kvant.models.cpu.weights import Code, PackedWeight, code_bytes
from kvant.weights.format import Scale


@cache
def embedding_worker(code: Code) -> int:
    """Returns the address of void(task, _), which every thread runs."""
    fmt, bits, size = code.format, code.bits, code_bytes(code)
    is_half, is_signed, has_offsets = (
        fmt.scale is Scale.FLOAT16,
        fmt.scale is Scale.INT8,
        fmt.offsets,
    )
    width = fmt.scale.num_bytes
    groups = GROUP // fmt.columns
    group_inputs = fmt.columns
    per = max(1, fmt.superblock // GROUP)
    zero = np.float32(0.0 if has_offsets else 1 << (bits - 1))

    def work(task: int, _: int) -> None:
        rows, columns = load_i64(task + Embed.ROWS), load_i64(task + Embed.COLUMNS)
        ids, stride = load_i64(task + Embed.IDS), load_i64(task + Embed.STRIDE)
        blocks = columns // 32
        room = blocks * groups * 16 * width
        while True:
            row = fetch_add(task + Embed.NEXT, 1)
            if row >= rows:
                return
            index = load_i64(ids + 8 * row)
            tile, lane = load_i64(task + Embed.WEIGHT) + index // 16 * stride, index % 16
            out = load_i64(task + Embed.OUT) + row * load_i64(task + Embed.OUT_STRIDE)
            scales = tile + blocks * size
            offsets = scales + room
            factors = offsets + room if has_offsets else offsets
            offset_factors = factors + blocks // per * 32
            for column in range(columns):
                block, i = column // 32, column % 32
                group = block * groups + i % 32 // group_inputs
                if bits == 8:
                    number = load_u8(tile + block * size + i // 4 * 64 + lane * 4 + i % 4)
                else:
                    v = i // 4 % 4
                    number = load_u8(tile + block * size + v * 64 + lane * 4 + i % 4)
                    number = number >> 4 if i >= 16 else number & 15
                    if bits == 6:
                        upper = load_u8(tile + block * size + 256 + i // 16 * 64 + lane * 4 + i % 4)
                        number |= ((upper >> (2 * v)) & 3) << 4
                value = np.float32(number) - zero
                at = (group * 16 + lane) * width
                if is_half:
                    scale = load_f16(scales + at)
                else:
                    small = load_u8(scales + at)
                    if is_signed and small > 127:
                        small -= 256
                    scale = np.float32(small) * load_f16(factors + (block // per * 16 + lane) * 2)
                value = value * scale
                if has_offsets:
                    if is_half:
                        value = value + load_f16(offsets + at)
                    else:
                        factor = load_f16(offset_factors + (block // per * 16 + lane) * 2)
                        value = value - np.float32(load_u8(offsets + at)) * factor
                store_f32(out + 4 * column, value)

    return compiled_worker(work)


def embedding_task(weight: PackedWeight, out: Tensor) -> Block:
    """Returns a task that decodes a weight's rows, with scales in tiles, into out [T, columns]. The caller
    sets IDS and ROWS.
    """
    made = block_of(Embed)
    made[Embed.WORKER // 8] = embedding_worker(weight.code)
    made[Embed.WEIGHT // 8], made[Embed.STRIDE // 8] = (
        weight.codes.data_ptr(),
        weight.codes.stride(0),
    )
    made[Embed.COLUMNS // 8] = weight.columns
    made[Embed.OUT // 8], made[Embed.OUT_STRIDE // 8] = out.data_ptr(), 4 * out.stride(0)
    return made


class PackedEmbedding(nn.Module):
    """Replaces a module's embedding, for code outside the compiled forward that reads it."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.packed = weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids [..] int64 -> [.., columns] float32."""
        flat = ids.reshape(-1).contiguous()
        out = torch.empty(len(flat), self.packed.columns, dtype=torch.float32)
        task, (step, _team), operation = (
            embedding_task(self.packed, out),
            new_step(),
            block_of(Operation),
        )
        task[Embed.IDS // 8] = flat.data_ptr()
        step[StepFields.TOKENS // 8], step[StepFields.THREADS // 8] = len(flat), 1
        operation[Operation.KIND // 8], operation[Operation.TASK // 8] = Kind.TASK, address(task)
        run_function().call(address(step), address(operation), 0, 1)
        return out.view(*ids.shape, -1)


class WideEmbedding(nn.Embedding):
    """An embedding of bfloat16 numbers in a model that computes in float32."""

    @classmethod
    def of(cls, table: nn.Embedding) -> WideEmbedding:
        """Returns the same weight, not copied."""
        made = cls(table.num_embeddings, table.embedding_dim, device="meta")
        made.weight = table.weight
        return made

    def forward(self, ids: Tensor) -> Tensor:
        """ids [..] int64 -> [.., columns] float32."""
        return super().forward(ids).to(torch.float32)
