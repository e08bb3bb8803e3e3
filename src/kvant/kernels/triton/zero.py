"""Clear pages in all planes of a pool with one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvant.kernels.transfer import to_device


class PageEraser:
    """Clears pages of planes [num_pages, ..]; the bytes of a page must be a multiple of 4."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        device = planes[0].device
        page_bytes = [plane[0].numel() * plane.element_size() for plane in planes]
        assert all(size % 4 == 0 for size in page_bytes)
        self._planes = tuple(planes)  # they must live as long as their addresses are used
        self._addresses = torch.tensor([p.data_ptr() for p in planes], device=device)
        self._words = torch.tensor([size // 4 for size in page_bytes], device=device)
        self._most = max(page_bytes) // 4

    def clear(self, pages: Sequence[int]) -> None:
        device = self._addresses.device
        ids = to_device(torch.tensor(pages, dtype=torch.int64), device)
        block = 1024
        grid = (len(pages), len(self._planes), triton.cdiv(self._most, block))
        clear_pages[grid](self._addresses, self._words, ids, BLOCK=block, num_warps=4)


@triton.jit
def clear_pages(addresses, words, pages, BLOCK: tl.constexpr):
    """Program (page, plane, BLOCK words)."""
    plane = tl.program_id(1)
    size = tl.load(words + plane)
    start = tl.load(addresses + plane).to(tl.pointer_type(tl.int32))
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + tl.program_id(0))
    tl.store(start + page * size + c, tl.zeros((BLOCK,), tl.int32), mask=c < size)
