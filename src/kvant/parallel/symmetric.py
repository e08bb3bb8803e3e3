"""All-reduce of few rows over NVLink in one launch, through memory that every rank can write.

Each rank writes its rows into every other rank's inbox, raises a flag there, waits for the others' flags, and
adds the parts in float32 in the order of ranks. torch's own operations on symmetric memory add bfloat16
in bfloat16. NVLink multicast is not used. `torch.distributed._symmetric_memory` is private, and only this
file imports it.

Sums use an inbox's two slots in turn. Before a rank writes a slot again, it has every other rank's flag of
the sum in between. Each rank raised that flag after it had read the slot. So one handshake per sum is enough.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.errors import EngineFault
from kvant.kernels.triton.device import launches_ahead
from kvant.models.sharding.shard import Shard

MOST_ROWS = 256
"""Most rows of one sum. Larger sums go through NCCL."""

MOST_ROWS_OF_TWO = 1024
"""The same for two ranks, which must read each other's whole rows in any case."""

_CHECKS = 3
_SPINS = 4096
"""Reads of a flag between two checks whether the sum was aborted."""


class SymmetricSums:
    """Sums x [n, width] of one dtype, n up to a maximum. Every rank constructs it with equal arguments."""

    def __init__(self, shard: Shard, width: int, dtype: torch.dtype, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.width, self.dtype = width, dtype
        self._shard = shard
        self._most_rows = most = MOST_ROWS_OF_TWO if shard.size == 2 else MOST_ROWS
        self._flag_bytes = 4 * shard.size * most
        num_bytes = self._flag_bytes + 2 * shard.size * most * width * dtype.itemsize
        memory: Any = symmetric_memory
        self._memory = memory.empty(num_bytes, dtype=torch.uint8, device=device)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        assert dist.group.WORLD is not None
        self._handle = memory.rendezvous(self._memory, dist.group.WORLD.group_name)
        self._peers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._epochs = torch.zeros(most, dtype=torch.int32, device=device)
        self._broken = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._launches_ahead = launches_ahead(device)
        dist.barrier()  # flags are zero everywhere

    def takes(self, x: Tensor) -> bool:
        """Returns whether x [.., width] has the width, dtype and number of rows that this sums."""
        return (
            x.dtype is self.dtype
            and x.shape[-1] == self.width
            and x.numel() <= self._most_rows * self.width
        )

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x [.., width], like `RankGroup.sum`. x: contiguous."""
        out = torch.empty_like(x)
        self._launch(x, out, out, out, 0.0, adds=False)
        return out

    def sum_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Sums x [n, width], adds the sum to `residual` in place, and applies an RMS norm to the result.

        Returns the normed rows and `residual`, like `Kernels.add_rms_norm` of the sum.
        """
        out = torch.empty_like(x)
        self._launch(x, residual, weight, out, eps, adds=True)
        return out, residual

    def break_off(self) -> None:
        """Ends kernels that wait for a lost rank; their sums are wrong. Any thread may call it."""
        self._broken[0] = 1

    def check(self) -> None:
        """Raises EngineFault unless sums equal those of NCCL's gather bitwise. Every rank must call it."""
        shard, device = self._shard, self._epochs.device
        generator = torch.Generator(device).manual_seed(shard.rank)
        for rows in (1, 5, self._most_rows):
            for _ in range(_CHECKS):
                x = torch.empty(rows, self.width, dtype=self.dtype, device=device)
                x.normal_(generator=generator)
                parts = x.new_empty(shard.size, *x.shape)
                dist.all_gather_into_tensor(parts.view(-1), x.view(-1))
                total = parts[0].float()
                for part in parts[1:]:
                    total = total + part.float()
                expected = total.to(self.dtype)
                residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
                _, added = self.sum_add_norm(x, residual, weight, 1e-6)
                if not torch.equal(self.sum(x), expected) or not torch.equal(added, expected):
                    raise EngineFault(
                        f"rank {shard.rank}: sums over NVLink differ from NCCL's: this machine's "
                        "GPUs do not see each other's writes"
                    )

    def _launch(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, adds: bool
    ) -> None:
        rows = x.numel() // self.width
        # Launch the next product ahead for one row only: with more rows it loads no weights early.
        ahead = self._launches_ahead and rows == 1
        _sum_rows[(rows,)](
            x, residual, weight, out, self._epochs, self._peers, self._broken, eps,
            FLAG_BYTES=self._flag_bytes, RANK=self._shard.rank, SIZE=self._shard.size,
            ROWS=self._most_rows, WIDTH=self.width, PAD=triton.next_power_of_2(self.width), ADDS=adds,
            SPINS=_SPINS, num_warps=8 if self.width > 2048 else 4, AHEAD=ahead,
            **({"launch_pdl": True} if ahead else {}),
        )  # fmt: skip


@triton.jit
def _sum_rows(x, residual, weight, out, epochs, peers, broken, eps,
              FLAG_BYTES: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
              ROWS: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, ADDS: tl.constexpr,
              SPINS: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    if AHEAD:  # the next product loads its weights while this kernel waits for other ranks
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    at = row.to(tl.int64) * WIDTH
    epoch = tl.load(epochs + row) + 1
    slot = (epoch & 1).to(tl.int64)
    c = tl.arange(0, PAD)
    mask = c < WIDTH
    own = tl.load(x + at + c, mask=mask, other=0.0)
    dtype = own.dtype
    for r in tl.static_range(SIZE):
        if r != RANK:
            inbox = (tl.load(peers + r) + FLAG_BYTES).to(tl.pointer_type(dtype))
            tl.store(inbox + (slot * SIZE + RANK) * ROWS * WIDTH + at + c, own, mask=mask)
    tl.debug_barrier()  # the whole row is written before one thread raises the flag
    for r in tl.static_range(SIZE):
        if r != RANK:
            flags = tl.load(peers + r).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + RANK * ROWS + row, epoch, sem="release", scope="sys")
    mine = tl.load(peers + RANK)
    flags = mine.to(tl.pointer_type(tl.int32))
    for r in tl.static_range(SIZE):
        if r != RANK:
            ahead = tl.atomic_add(flags + r * ROWS + row, 0, sem="acquire", scope="sys") - epoch
            spins = 0
            while ahead < 0:  # epochs may wrap, so compare their difference
                ahead = tl.atomic_add(flags + r * ROWS + row, 0, sem="acquire", scope="sys") - epoch
                spins += 1
                if spins % SPINS == 0:  # noqa: SIM102  # "and" would load each time
                    if tl.load(broken, volatile=True) != 0:
                        ahead = 0
    tl.debug_barrier()
    inbox = (mine + FLAG_BYTES).to(tl.pointer_type(dtype)) + slot * SIZE * ROWS * WIDTH + at + c
    total = tl.zeros((PAD,), tl.float32)
    for r in tl.static_range(SIZE):
        if r == RANK:
            part = own
        else:
            part = tl.load(inbox + r * ROWS * WIDTH, mask=mask, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    value = total.to(dtype)
    if ADDS:
        value = (
            value.to(tl.float32) + tl.load(residual + at + c, mask=mask, other=0.0).to(tl.float32)
        ).to(dtype)
        tl.store(residual + at + c, value, mask=mask)
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        w = tl.load(weight + c, mask=mask, other=0.0)
        value = ((wide * scale).to(dtype).to(tl.float32) * w.to(tl.float32)).to(dtype)
    tl.store(out + at + c, value, mask=mask)
    tl.store(epochs + row, epoch)
