"""Collectives of the ranks of one engine: gloo on CPUs, NCCL on GPUs.

Sums are added in float32 and in the order of ranks, so every rank gets the same bits, and a row's bits do
not depend on the number of rows.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvant.errors import EngineFault
from kvant.models.sharding.shard import Shard

TIMEOUT = timedelta(seconds=600)
"""Of one collective: longer than any step. `kvant.parallel.ranks` finds ranks that died or hang."""

_ONE_SHOT_BYTES = 256 * 1024
"""Larger sums on more than two ranks go in two shots, which move fewer bytes."""


class RankGroup:
    """The collectives of one rank. `connect` meets the others; before that nothing can be summed."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self._device = device
        self._backend: Any = None

    def connect(self, directory: Path) -> None:
        """Meet the other ranks through files in `directory`. Waits for all of them."""
        made: Any = dist  # some of its names have no types
        store = made.FileStore(str(directory / "store"), self.shard.size)
        rank, size = self.shard.rank, self.shard.size
        if self._device.type == "cpu":
            options = made.ProcessGroupGloo._Options()
            options._devices = [made.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = TIMEOUT
            self._backend = made.ProcessGroupGloo(store, rank, size, options)
            return
        if dist.is_initialized():
            raise EngineFault("another engine with several GPUs runs in this process")
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=TIMEOUT,
            device_id=self._device,
        )  # fmt: skip
        self._backend = dist.group.WORLD

    def abort(self, _reason: str) -> None:
        """Break off collectives that wait for a lost rank; any thread may call it.

        gloo notices by itself that a connection ended. NCCL's kernels would wait for ever.
        """
        if self._backend is not None and self._device.type != "cpu":
            self._backend._get_backend(self._device).abort()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x [..], added in float32 in the order of ranks: equal bits everywhere."""
        if x.device.type == "cpu":
            return _added(self._gather_on_host(x.contiguous())).to(x.dtype)
        if self.shard.size == 2 or x.numel() * x.element_size() <= _ONE_SHOT_BYTES:
            return _added(self._gather_on_device(x.contiguous())).to(x.dtype)
        return self._sum_in_two(x)

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x [.., n], one behind the other in the order of ranks: [.., size * n]."""
        x = x.contiguous()
        parts = self._gather_on_host(x) if x.device.type == "cpu" else self._gather_on_device(x)
        return torch.cat(list(parts), -1)

    def _gather_on_host(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        self._backend.allgather([parts], [x]).wait()
        return parts

    def _gather_on_device(self, x: Tensor) -> Tensor:
        """[size, ..]."""
        parts = x.new_empty((self.shard.size, *x.shape))
        dist.all_gather_into_tensor(parts.view(-1), x.view(-1))
        return parts

    def _sum_in_two(self, x: Tensor) -> Tensor:
        """Each rank sums its part of all, then all parts go to all ranks: same order, same bits."""
        size, flat = self.shard.size, x.reshape(-1)
        width = -(-flat.numel() // size)
        if width * size != flat.numel():
            flat = torch.nn.functional.pad(flat, (0, width * size - flat.numel()))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat)
        own = _added(parts.view(size, width)).to(x.dtype)
        whole = torch.empty_like(flat)
        dist.all_gather_into_tensor(whole, own)
        return whole[: x.numel()].view(x.shape)


def _added(parts: Tensor | list[Tensor]) -> Tensor:
    """Parts one after another in float32, or wider for wider numbers."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total
