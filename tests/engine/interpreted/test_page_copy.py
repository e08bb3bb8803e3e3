"""Pages of an arena become rows, and rows become pages, at any places."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvant.kernels.triton.page_copy import PageGather


def test_pages_become_rows_and_come_back() -> None:
    made = torch.Generator().manual_seed(0)
    # Pieces of several blocks, of less than one, and of one word.
    pieces = [
        torch.randint(0, 256, (7, size), dtype=torch.uint8, generator=made)
        for size in (40_000, 48, 8, 16_384)
    ]
    before = [piece.clone() for piece in pieces]
    gather = PageGather(pieces)
    gather.warm_up()
    assert gather.row_words * 8 == sum(piece.shape[1] for piece in pieces)
    rows = torch.zeros(3, gather.row_words, dtype=torch.int64)
    gather.gather(torch.tensor([5, 0, 2]), rows)
    expected = torch.cat([piece[[5, 0, 2]] for piece in before], 1)
    assert torch.equal(rows.view(torch.uint8).view(3, -1), expected)
    gather.scatter(rows, torch.tensor([1, 6, 3]))
    for piece, old in zip(pieces, before, strict=True):
        assert torch.equal(piece[[1, 6, 3]], old[[5, 0, 2]])
        assert torch.equal(piece[[0, 2, 4, 5]], old[[0, 2, 4, 5]])
