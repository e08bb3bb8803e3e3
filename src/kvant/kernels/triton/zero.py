"""Clears pages of an arena: one launch per group of pages, or one launch in a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvant.kernels.listed_pages import GROUP
from kvant.kernels.transfer import to_device

_BLOCK = 1024


class PageEraser:
    """Clears pages. groups: for each group its pieces, uint8 [num_pages, n], n a multiple of 4.

    A model that stores nothing has no groups.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._pieces = [tuple(pieces) for pieces in groups if pieces]  # their addresses are used
        self._facts = [
            torch.tensor([(p.data_ptr(), p.shape[1] // 4) for p in pieces], device=pieces[0].device)
            for pieces in self._pieces
        ]
        self._most = [max(p.shape[1] // 4 for p in pieces) for pieces in self._pieces]

        self._every: Tensor | None = None
        if self._pieces:
            self._every = torch.cat(
                [
                    torch.cat([facts, torch.full_like(facts[:, :1], group)], 1)
                    for group, facts in enumerate(self._facts)
                ]
            )

    def clear(self, pages: Sequence[Sequence[int]]) -> None:
        """Clears pages by their ids, given for each group."""
        for place, some in enumerate(pages):
            if some and self._facts:
                facts = self._facts[place]
                ids = to_device(torch.tensor(some, dtype=torch.int64), facts.device)
                grid = (len(some), len(facts), triton.cdiv(self._most[place], _BLOCK))
                clear_pages[grid](facts, ids, BLOCK=_BLOCK, num_warps=4)

    def clear_listed(self, entries: Tensor) -> None:
        """Clears pages; CUDA graphs can capture it.

        entries: [n] int64 on the device, from `listed_pages.listed`.
        """
        if self._every is not None:
            grid = (len(entries), len(self._every))
            clear_listed[grid](self._every, entries, GROUP=GROUP, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def clear_listed(facts, entries, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Program (entry, piece). facts: for each piece its address, the words of a page, and its group."""
    entry = tl.load(entries + tl.program_id(0))
    piece = facts + 3 * tl.program_id(1)
    if (entry > 0) & (entry // GROUP == tl.load(piece + 2)):
        words = tl.load(piece + 1)
        start = tl.load(piece).to(tl.pointer_type(tl.int32)) + entry % GROUP * words
        for first in range(0, words, BLOCK):
            c = first + tl.arange(0, BLOCK)
            tl.store(start + c, tl.zeros((BLOCK,), tl.int32), mask=c < words)


@triton.jit
def clear_pages(facts, pages, BLOCK: tl.constexpr):
    """Program (page, piece, BLOCK words). facts: for each piece its address, and the words of a page."""
    piece = facts + 2 * tl.program_id(1)
    start = tl.load(piece).to(tl.pointer_type(tl.int32))
    words = tl.load(piece + 1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + tl.program_id(0))
    tl.store(start + page * words + c, tl.zeros((BLOCK,), tl.int32), mask=c < words)
