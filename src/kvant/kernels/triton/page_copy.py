"""Gathers pages of an arena into rows, and scatters rows into pages: one launch for all layers.

A page's pieces lie far apart in an arena with one group. A row holds them contiguously, so that they cross
a bus as one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


class PageGather:
    """Copies pages of one group.

    pieces: uint8 [num_pages, n] each, n a multiple of 8; read and written in place.
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = tuple(pieces)
        facts, at = [], 0
        for piece in pieces:
            words = piece.shape[1] // 8
            facts.append((piece.data_ptr(), words, at))
            at += words
        self.row_words = at
        self._facts = torch.tensor(facts, dtype=torch.int64, device=pieces[0].device)
        self._blocks = triton.cdiv(max(words for _, words, _ in facts), _BLOCK)

    def warm_up(self) -> None:
        """Compiles both directions with page 0, whose contents are arbitrary, before threads launch them."""
        scratch = torch.zeros(1, dtype=torch.int64, device=self._facts.device)
        rows = torch.empty(1, self.row_words, dtype=torch.int64, device=self._facts.device)
        self.gather(scratch, rows)
        self.scatter(rows, scratch)

    def gather(self, pages: Tensor, rows: Tensor) -> None:
        """Copies pages [k] int64 into rows, int64 [at least k, row_words], contiguous."""
        self._launch(pages, rows, True)

    def scatter(self, rows: Tensor, pages: Tensor) -> None:
        """Copies rows, int64 [at least k, row_words], into pages [k] int64."""
        self._launch(pages, rows, False)

    def _launch(self, pages: Tensor, rows: Tensor, to_rows: bool) -> None:
        grid = (len(pages), len(self._facts), self._blocks)
        copy_pages[grid](
            self._facts, pages, rows, self.row_words, TO_ROWS=to_rows, BLOCK=_BLOCK, num_warps=8
        )


@triton.jit
def copy_pages(facts, pages, rows, row_words, TO_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, piece, BLOCK words of 8 bytes). facts: for each piece its address, the words of a page,
    and its offset in a row."""
    piece = facts + 3 * tl.program_id(1)
    start = tl.load(piece).to(tl.pointer_type(tl.int64))
    words = tl.load(piece + 1)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + row)
    stored = start + page * words + c
    packed = rows + row * row_words + tl.load(piece + 2) + c
    inside = c < words
    if TO_ROWS:
        tl.store(packed, tl.load(stored, mask=inside), mask=inside)
    else:
        tl.store(stored, tl.load(packed, mask=inside), mask=inside)
