"""Tiers from the pools of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvant.kv.offload.files import FileQueue
from kvant.kv.offload.mover import Copier, HostRows, MemoryCopier, PageMover
from kvant.kv.offload.moves import Bell, Mover
from kvant.kv.offload.page_files import PageFiles
from kvant.kv.offload.policy import HOST_RATES, BreakEven
from kvant.kv.offload.source import Files, Source
from kvant.kv.offload.tiers import Catalog, Tiers
from kvant.kv.pages import SharedPages

Spread: TypeAlias = "Callable[[PageMover, FileQueue | None, Bell], tuple[Mover, Files | None]]"


def build_tiers(
    shared: SharedPages,
    pieces: Sequence[Sequence[Tensor]],
    host_bytes: int,
    *,
    files: PageFiles | None = None,
    policy: BreakEven | None = None,
    peers: Callable[[HostRows, Bell], Sequence[Source]] | None = None,
    give: Callable[[HostRows, Catalog], object] | None = None,
    spread: Spread | None = None,
) -> Tiers:
    """Builds the tiers below the pages `shared`.

    pieces: for each group, the pieces of its pages, uint8 [num_pages, n] each, see `pieces_of`. host_bytes:
    of host memory. peers: builds the sources that read pages of other engines into host memory. give: builds
    the object that lets other engines read them; it lives as long as the tiers. spread: with several ranks,
    builds one mover over all ranks' host memory; files are this rank's. Raises DoesNotFit if a GPU cannot
    reach that much host memory.
    """
    per_superblock = [group.per_superblock for group in shared.every]
    bell = Bell()
    own = make_mover(pieces, per_superblock, host_bytes, bell)
    rows = own.rows
    host = SharedPages(rows.num_superblocks, shared.every_window, per_superblock)
    queue = None if files is None else FileQueue(files, bell, own.row)
    mover, found = (own, queue) if spread is None else spread(own, queue, bell)
    if policy is None:
        policy = BreakEven(host_rate=HOST_RATES["cuda" if rows.is_pinned else "cpu"])
    others = () if peers is None else peers(rows, bell)
    tiers = Tiers(shared, host, mover, bell=bell, policy=policy, files=found, peers=others)
    if give is not None:
        tiers.kept = give(rows, tiers.catalog)
    return tiers


def make_mover(
    pieces: Sequence[Sequence[Tensor]], per_superblock: Sequence[int], host_bytes: int, bell: Bell
) -> PageMover:
    """Allocates host memory for a device's pages, and builds the mover that copies them there and back.

    pieces: uint8 [num_pages, n] each, by group; host_bytes: as in `build_tiers`. per_superblock: pages of
    each group. Raises DoesNotFit.
    """
    row_bytes = [sum(piece.shape[1] for piece in of_group) for of_group in pieces]
    superblock = max(n * size for n, size in zip(per_superblock, row_bytes, strict=True))
    count = 1 + host_bytes // superblock  # the first one is the scratch pages', as in any arena
    device = next(piece.device for of_group in pieces for piece in of_group)
    rows = HostRows(row_bytes, count, superblock, per_superblock, pinned=device.type != "cpu")
    return PageMover(rows, _copiers(pieces, rows, device), bell)


def _copiers(
    pieces: Sequence[Sequence[Tensor]], rows: HostRows, device: torch.device
) -> Callable[[], Copier]:
    if device.type == "cpu":
        return lambda: MemoryCopier(pieces, rows)
    from kvant.kernels.triton.page_copy import PageGather
    from kvant.kv.offload.gpu_copier import BusCopier

    gathers = [PageGather(of_group) for of_group in pieces]
    for gather in gathers:
        gather.warm_up()
    return lambda: BusCopier(gathers, rows, device)
