"""Collectives of the ranks of one engine: gloo on CPUs, NCCL on GPUs.

Sums are added in float32 and in the order of ranks, so every rank gets the same bits, and a row's bits do
not depend on the number of rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvant.errors import EngineFault, NotServable, WayOut
from kvant.models.sharding.shard import Shard

if TYPE_CHECKING:
    from kvant.parallel.symmetric import SymmetricSums

TIMEOUT = timedelta(seconds=600)
"""Time limit of one collective, longer than any step. `kvant.parallel.ranks` detects lost ranks sooner."""

_SUMMED_OVER_NVLINK = (torch.bfloat16, torch.float16, torch.float32)

_LEAVE_SECONDS = 5.0
_ONE_SHOT_BYTES = 256 * 1024
"""Larger sums on more than two ranks use reduce-scatter and all-gather, which move fewer bytes."""


LOOPBACK = "127.0.0.1"


def open_store(meet: str, size: int) -> Any:
    """Opens the store where ranks exchange addresses. meet: a directory, or HOST:PORT of rank 0's store."""
    made: Any = dist
    if meet.startswith("/"):
        return made.FileStore(f"{meet}/store", size)
    host, _, port = meet.rpartition(":")
    return made.TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)


class RankGroup:
    """The collectives of one rank. Call `connect`, which waits for the other ranks, before any sum."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self._device = device
        self._backend: Any = None
        self._symmetric: SymmetricSums | None = None
        self._is_alone = self._is_together = False

    def connect(self, store: Any, width: int, dtype: torch.dtype, address: str = LOOPBACK) -> None:
        """Connects to the other ranks through a store (`open_store`). Waits for all of them.

        width, dtype: of the rows that forwards sum. address: this machine's address, for ranks on other
        machines.
        """
        made: Any = dist  # some of its names have no types
        rank, size = self.shard.rank, self.shard.size
        if self._device.type == "cpu":
            options = made.ProcessGroupGloo._Options()
            options._devices = [made.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = TIMEOUT
            self._backend = made.ProcessGroupGloo(store, rank, size, options)
            return
        # Without NVLink multicast, which not every driver and virtual machine offers.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        if dist.is_initialized():
            raise EngineFault("another engine with several GPUs runs in this process")
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=TIMEOUT,
            device_id=self._device,
        )  # fmt: skip
        self._backend = dist.group.WORLD
        if dtype in _SUMMED_OVER_NVLINK and address == LOOPBACK and _all_see_each_other(size):
            from kvant.parallel.symmetric import SymmetricSums

            self._symmetric = SymmetricSums(self.shard, width, dtype, self._device)
            self._symmetric.check()

    def abort(self, _reason: str) -> None:
        """Aborts collectives that wait for a lost rank. Any thread may call it.

        gloo detects closed connections itself. NCCL's kernels would wait for ever.
        """
        if self._symmetric is not None:
            self._symmetric.break_off()
        if self._backend is not None and self._device.type != "cpu":
            self._backend._get_backend(self._device).abort()

    def close(self) -> None:
        """Leaves the group. On a GPU, another engine of this process may have ranks afterwards."""
        if self._backend is not None and self._device.type != "cpu" and dist.is_initialized():
            self._symmetric = None
            # NCCL waits until recorded steps are freed. A kernel that waits for lost ranks may prevent that.
            leaving = threading.Thread(target=self._leave, daemon=True)
            leaving.start()
            leaving.join(_LEAVE_SECONDS)
        self._backend = None

    def _leave(self) -> None:
        # The other ranks have ended: collectives that wait for them would never end.
        self._backend._get_backend(self._device).abort()
        dist.destroy_process_group()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Allows collectives inside the block: the caller must make every rank run the same step there."""
        self._is_together = True
        try:
            yield
        finally:
            self._is_together = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Makes collectives inside the block local: results have the right shape but wrong values."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x [..], added in float32 in the order of ranks: equal everywhere."""
        if self._is_alone or x.numel() == 0:
            return x
        self._check_together()
        if x.device.type == "cpu":
            return _added(self._gather_on_host(x.contiguous())).to(x.dtype)
        x = x.contiguous()
        if self._symmetric is not None and self._symmetric.takes(x):
            return self._symmetric.sum(x)
        if self.shard.size == 2 or x.numel() * x.element_size() <= _ONE_SHOT_BYTES:
            return _added_on_device(self._gather_on_device(x))
        return self._sum_in_two(x)

    def sum_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Sums x, adds the sum to `residual` in place and applies an RMS norm, all in one launch.

        x, residual: [n, width]. weight: [width]. All have one dtype. Returns the normed rows and `residual`,
        or None if no kernel does this in one launch; then nothing has happened.
        """
        if (
            self._symmetric is None
            or self._is_alone
            or x.numel() == 0
            or not self._symmetric.takes(x)
        ):
            return None
        self._check_together()
        return self._symmetric.sum_add_norm(x.contiguous(), residual, weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        """Returns all ranks' x [.., n], of any dtype, concatenated in the order of ranks, [.., size * n]."""
        if self._is_alone or x.numel() == 0:
            return torch.cat([x] * self.shard.size, -1)
        self._check_together()
        x = x.contiguous()
        parts = self._gather_on_host(x) if x.device.type == "cpu" else self._gather_on_device(x)
        return torch.cat(list(parts), -1)

    def _check_together(self) -> None:
        if not self._is_together:
            raise NotServable(
                "this runs on one device, not on several ranks",
                why="it computes with the model outside of the engine's steps",
                ways_out=(WayOut("run on one device", ("--tensor-parallel-size", "1")),),
            )

    def _gather_on_host(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        self._backend.allgather([parts], [x]).wait()
        return parts

    def _gather_on_device(self, x: Tensor) -> Tensor:
        """Returns all ranks' x as one tensor [size, ..]."""
        parts = x.new_empty((self.shard.size, *x.shape))
        dist.all_gather_into_tensor(parts.view(-1), x.view(-1))
        return parts

    def _sum_in_two(self, x: Tensor) -> Tensor:
        """Sums by all-to-all, a local sum of one part per rank, and all-gather: equal bits on all ranks."""
        size, flat = self.shard.size, x.reshape(-1)
        width = -(-flat.numel() // size)
        if width * size != flat.numel():
            flat = torch.nn.functional.pad(flat, (0, width * size - flat.numel()))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat)
        own = _added_on_device(parts.view(size, width))
        whole = torch.empty_like(flat)
        dist.all_gather_into_tensor(whole, own)
        return whole[: x.numel()].view(x.shape)


def _added_on_device(parts: Tensor) -> Tensor:
    """Returns the sum [..] of parts [size, ..] in their dtype, added in order in float32 or wider."""
    if parts.dtype is torch.float64:
        return _added(parts)
    from kvant.parallel.triton_sums import added

    return added(parts)


def _all_see_each_other(size: int) -> bool:
    """Returns whether each of the first `size` GPUs can write the others' memory."""
    gpus = range(torch.cuda.device_count())[:size]
    return all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)


def _added(parts: Tensor | list[Tensor]) -> Tensor:
    """Returns the sum of the parts, added in order in float32, or in float64 for float64 parts."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total
