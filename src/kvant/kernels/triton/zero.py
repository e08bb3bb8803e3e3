"""Clear pages of an arena: one launch per group of pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvant.kernels.transfer import to_device

_BLOCK = 1024


class PageEraser:
    """Clears pages of some groups: of each its pieces, uint8 [num_pages, n], n a multiple of 4.

    A model that stores nothing has no groups.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._pieces = [tuple(pieces) for pieces in groups if pieces]  # their addresses are used
        self._facts = [
            torch.tensor([(p.data_ptr(), p.shape[1] // 4) for p in pieces], device=pieces[0].device)
            for pieces in self._pieces
        ]
        self._most = [max(p.shape[1] // 4 for p in pieces) for pieces in self._pieces]

    def clear(self, pages: Sequence[Sequence[int]]) -> None:
        """pages: ids of each group."""
        for place, some in enumerate(pages):
            if some and self._facts:
                facts = self._facts[place]
                ids = to_device(torch.tensor(some, dtype=torch.int64), facts.device)
                grid = (len(some), len(facts), triton.cdiv(self._most[place], _BLOCK))
                clear_pages[grid](facts, ids, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def clear_pages(facts, pages, BLOCK: tl.constexpr):
    """Program (page, piece, BLOCK words). facts: of each piece its address, and words of a page."""
    piece = facts + 2 * tl.program_id(1)
    start = tl.load(piece).to(tl.pointer_type(tl.int32))
    words = tl.load(piece + 1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + tl.program_id(0))
    tl.store(start + page * words + c, tl.zeros((BLOCK,), tl.int32), mask=c < words)
