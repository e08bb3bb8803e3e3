"""Tasks of matrix products, and a product for rows outside a program."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.kernels.cpu.block import Block, address, block_of
from kvant.models.cpu.info import refuse_shape
from kvant.models.cpu.layout import Kind, Operation, Product, StepFields
from kvant.models.cpu.product import OUTPUTS, product_worker
from kvant.models.cpu.run import new_step, run_function
from kvant.models.cpu.weights import Code, PackedWeight

_CHUNK_BYTES = 131072
"""Bytes of decoded weight rows that a thread takes at a time: they stay in its level 2 cache."""
_CHUNKS_A_THREAD = 4


def float_rows(rows: int, columns: int) -> Tensor:
    """Allocate float32 [rows, columns] on the CPU for compiled code, regardless of torch's defaults."""
    return torch.empty(rows, columns, dtype=torch.float32, device="cpu")


class Linear:
    """A stored weight and a bias [outputs] or None, with the block that describes its product."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        assert refuse_shape(weight.rows, weight.columns) is None
        self.weight = weight
        self.bias = weight.codes.new_zeros(weight.rows, dtype=torch.float32)
        if bias is not None:
            self.bias += bias
        self._scratch = float_rows(0, 0)

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + self.bias.numel() * 4

    def task(self, x: Tensor, out: Tensor, scratch: Tensor) -> Block:
        """Describe the product of x [T, columns] into out [T, outputs], float32; the caller sets ROWS.

        scratch: float32 [threads, scratch_floats]. The block holds the addresses of all three.
        """
        weight, scales = self.weight, self.weight.scales
        made = block_of(Product)
        made[Product.WORKER // 8] = product_worker(weight.code)
        made[Product.WEIGHT // 8] = weight.codes.data_ptr()
        made[Product.STRIDE // 8] = weight.codes.stride(0) * weight.codes.element_size()
        if scales is not None:
            made[Product.SCALES // 8] = scales.data_ptr()
            made[Product.SCALES_STRIDE // 8] = scales.stride(0) * scales.element_size()
        made[Product.BIAS // 8] = self.bias.data_ptr()
        made[Product.OUTPUTS // 8] = weight.rows
        made[Product.COLUMNS // 8] = weight.columns
        made[Product.CHUNK // 8] = self._chunk(scratch.shape[0])
        made[Product.X // 8], made[Product.X_STRIDE // 8] = x.data_ptr(), x.stride(0) * 4
        made[Product.OUT // 8], made[Product.OUT_STRIDE // 8] = out.data_ptr(), out.stride(0) * 4
        made[Product.SCRATCH // 8] = scratch.data_ptr()
        made[Product.SCRATCH_STRIDE // 8] = scratch.stride(0) * 4
        return made

    @property
    def scratch_floats(self) -> int:
        """What one thread needs."""
        if self.weight.code is Code.FLOAT32:
            return 0
        return (self._chunk(1) + OUTPUTS) * self.weight.columns

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns], float32 -> [T, outputs]; now, on torch's threads."""
        x = x.contiguous()
        out = float_rows(x.shape[0], self.weight.rows)
        threads = torch.get_num_threads()
        if self._scratch.shape != (threads, self.scratch_floats):
            self._scratch = float_rows(threads, self.scratch_floats)
        task = self.task(x, out, self._scratch)
        (step, _team), operation = new_step(), block_of(Operation)
        step[StepFields.TOKENS // 8] = x.shape[0]
        step[StepFields.THREADS // 8] = threads
        operation[Operation.KIND // 8] = Kind.TASK
        operation[Operation.TASK // 8] = address(task)
        run_function().call(address(step), address(operation), 0, 1)
        return out

    def _chunk(self, threads: int) -> int:
        """A multiple of OUTPUTS: as much as fits, but several for each thread."""
        most = _CHUNK_BYTES // (4 * self.weight.columns)
        fair = self.weight.rows // (threads * _CHUNKS_A_THREAD)
        return max(OUTPUTS, min(most, fair) // OUTPUTS * OUTPUTS)
