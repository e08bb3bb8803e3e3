"""Makes tasks of matrix products, and multiplies rows outside a program."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.kernels.cpu.block import Block, address, block_of
from kvant.models.cpu.info import TILE, refuse_shape
from kvant.models.cpu.integer import integer_worker
from kvant.models.cpu.layout import Kind, Operation, Product, Round, StepFields
from kvant.models.cpu.product import OUTPUTS, ROWS, product_worker
from kvant.models.cpu.rounding import EXACT, block_bytes, round_worker
from kvant.models.cpu.run import new_step, run_function
from kvant.models.cpu.weights import Code, PackedWeight

_CHUNK_BYTES = 131072
"""Bytes of weight rows that a thread processes at a time. They stay in its level 2 cache."""
_CHUNKS_A_THREAD = 4


def float_rows(rows: int, columns: int) -> Tensor:
    """Allocates float32 [rows, columns] on the CPU for compiled code, regardless of torch's defaults."""
    return torch.empty(rows, columns, dtype=torch.float32, device="cpu")


def rounded_rows(rows: int, columns: int, digits: int) -> Tensor:
    """Allocates memory for rounded rows, uint8 [rows, bytes]."""
    size = columns // 32 * block_bytes(digits)
    return torch.empty(rows, size, dtype=torch.uint8, device="cpu")


def rounding(
    x: Tensor, out: Tensor, columns: int, digits: int, order: Tensor | None = None
) -> Block:
    """Returns the task that rounds x [T, columns], float32, into `rounded_rows`; the caller sets ROWS.

    order: int32 [columns], the columns of x in the order of the rounded ones; None if it is the same. The
    block holds its address.
    """
    made = block_of(Round)
    made[Round.WORKER // 8] = round_worker(digits, ordered=order is not None)
    made[Round.ORDER // 8] = 0 if order is None else order.data_ptr()
    made[Round.X // 8], made[Round.X_STRIDE // 8] = x.data_ptr(), x.stride(0) * 4
    made[Round.OUT // 8], made[Round.OUT_STRIDE // 8] = out.data_ptr(), out.stride(0)
    made[Round.COLUMNS // 8] = columns
    return made


class Linear:
    """A stored weight and a bias [outputs] or None, with the block that describes its product.

    digits: number of digits of activations, which products with narrow weights read as integers.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None, digits: int = EXACT) -> None:
        assert refuse_shape(weight.rows, weight.columns) is None
        self.weight, self.digits = weight, digits
        padded = -(-weight.rows // TILE) * TILE if self.rounds else weight.rows
        self.bias = torch.zeros(padded, dtype=torch.float32)
        if bias is not None:
            self.bias[: weight.rows] += bias

    @property
    def rounds(self) -> bool:
        """Whether the product reads rounded rows."""
        return not self.weight.code.is_number

    def scratch_bytes(self, threads: int) -> int:
        """Bytes of scratch that each thread wants for products of many rows, 0 for none."""
        if self.weight.code is not Code.BFLOAT16:
            return 0
        return self._chunk(threads) * self.weight.columns * 4

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + self.bias.numel() * 4

    def task(
        self,
        x: Tensor,
        out: Tensor,
        threads: int,
        scratch: Tensor | None = None,
        *,
        to_bf16: bool = False,
    ) -> Block:
        """Describe the product of x [T, columns] into out [T, outputs], float32; the caller sets ROWS.

        x: `rounded_rows` where the weight is narrow. scratch: uint8 [threads, at least `scratch_bytes`].
        to_bf16: results are rounded to bfloat16. The block holds the addresses of all.
        """
        weight, scales = self.weight, self.weight.scales
        made = block_of(Product)
        made[Product.WORKER // 8] = (
            integer_worker(weight.code, self.digits) if self.rounds else product_worker(weight.code)
        )
        made[Product.WEIGHT // 8] = weight.codes.data_ptr()
        made[Product.STRIDE // 8] = weight.codes.stride(0) * weight.codes.element_size()
        if scales is not None:
            made[Product.SCALES // 8] = scales.data_ptr()
        made[Product.BIAS // 8] = self.bias.data_ptr()
        made[Product.OUTPUTS // 8] = weight.rows
        made[Product.COLUMNS // 8] = weight.columns
        made[Product.CHUNK // 8] = self._chunk(threads)
        made[Product.X // 8], made[Product.X_STRIDE // 8] = (
            x.data_ptr(), x.stride(0) * x.element_size(),
        )  # fmt: skip
        made[Product.OUT // 8], made[Product.OUT_STRIDE // 8] = out.data_ptr(), out.stride(0) * 4
        made[Product.ROUNDS // 8] = to_bf16
        if scratch is not None and self.scratch_bytes(threads):
            assert scratch.shape[1] >= self.scratch_bytes(threads)
            made[Product.SCRATCH // 8] = scratch.data_ptr()
            made[Product.SCRATCH_STRIDE // 8] = scratch.stride(0)
        return made

    def __call__(self, x: Tensor, *, to_bf16: bool = False) -> Tensor:
        """x [T, columns], float32 -> [T, outputs]; now, on torch's threads. to_bf16: as in `task`."""
        x = x.contiguous()
        out = float_rows(x.shape[0], self.weight.rows)
        threads, tasks, given = torch.get_num_threads(), [], x
        if self.rounds:
            given = rounded_rows(x.shape[0], x.shape[1], self.digits)
            tasks.append(rounding(x, given, x.shape[1], self.digits, self.weight.order))
        scratch = None
        if x.shape[0] > ROWS:
            scratch = torch.empty(threads, self.scratch_bytes(threads), dtype=torch.uint8)
        tasks.append(self.task(given, out, threads, scratch, to_bf16=to_bf16))
        (step, _team), operations = new_step(), block_of(Operation, len(tasks))
        step[StepFields.TOKENS // 8] = x.shape[0]
        step[StepFields.THREADS // 8] = threads
        operations[:] = [n for task in tasks for n in (Kind.TASK, address(task), 0)]
        run_function().call(address(step), address(operations), 0, len(tasks))
        return out

    def _chunk(self, threads: int) -> int:
        """Returns rows (or tiles) per chunk: as many as fit, but few enough for several chunks per thread."""
        weight = self.weight
        unit = 1 if self.rounds else OUTPUTS
        size = 4 if weight.code.is_number else weight.codes.element_size()
        most = _CHUNK_BYTES // (weight.codes.stride(0) * size)
        fair = weight.codes.shape[0] // (threads * _CHUNKS_A_THREAD)
        return max(unit, min(most, fair) // unit * unit)


def chunk_of(weight: Tensor) -> int:
    """Outputs of an expert's weight [experts, outputs, columns] that a thread takes at a time."""
    outputs, columns = weight.shape[1:]
    most = min(_CHUNK_BYTES // (4 * columns), outputs // _CHUNKS_A_THREAD)
    return max(OUTPUTS, most // OUTPUTS * OUTPUTS)
