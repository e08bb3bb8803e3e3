"""Helpers that launches of Triton and CUDA kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """How one launch of the attention kernel is split.

    rows: query rows (query, head of the group) per program. tile: keys per iteration.
    programs: resident programs per multiprocessor. least: minimum keys of an item, in tiles. masked: every
    tile is masked, so that one loop copies all of them ahead.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    programs: int
    least: int = 1
    max_registers: int | None = None
    masked: bool = False

    def joined_at_once(self, rows: int) -> int:
        """Returns how many items a program joins at a time: they take at most half of its registers."""
        return max(1, min(16, 32 * self.warps // max(rows, 1)))


def outer(scale: Tensor | None) -> int:
    """Returns 0 without an outside scale, 1 for one [1], 2 for one per KV head [num_kv_heads]."""
    if scale is None:
        return 0
    return 1 if scale.numel() == 1 else 2


def address(tensor: Tensor | None) -> int:
    """Returns the address of a tensor's first number, 0 for None. tensor: [..] of any shape and dtype."""
    return 0 if tensor is None else tensor.data_ptr()


def plane_addresses(planes: Sequence[Tensor]) -> tuple[int, int]:
    """Returns the addresses of codes and scales, 0 without scales in the pages.

    planes: codes [num_pages, page_size, num_kv_heads, ..] uint8, and scales [num_pages, page_size,
    num_kv_heads, ..].
    """
    return planes[0].data_ptr(), planes[1].data_ptr() if len(planes) > 1 else 0
