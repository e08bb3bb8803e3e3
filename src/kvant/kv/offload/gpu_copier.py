"""Copies of pages over the bus of a GPU, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvant.kernels.triton.page_copy import PageGather
from kvant.kv.offload.mover import CHUNK_BYTES, HostRows


class BusCopier:
    """A `Copier` for the pages that `gathers` reach, one of them for each group.

    Pages are gathered into a buffer of the device, which crosses the bus in as few copies as the rows have
    gaps between them. The stream keeps the order: a buffer is used again when its copy is done.
    """

    def __init__(self, gathers: Sequence[PageGather], rows: HostRows, device: torch.device) -> None:
        self._gathers, self._rows, self._device = gathers, rows, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        words = max(CHUNK_BYTES // 8, *(gather.row_words for gather in gathers))
        self._buffer = torch.empty(words, dtype=torch.int64, device=device)

    def mark(self) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._stream.wait_event(mark)

    def store(self, group: int, pages: list[int], rows: list[int]) -> Callable[[], None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            gathered = self._rows_of(group, len(pages))
            self._gathers[group].gather(self._index(pages), gathered)
            for first, count, row in _runs(rows):
                target = self._host(group, row, count)
                target.copy_(gathered[first : first + count].view(torch.uint8), non_blocking=True)
            return self._done()

    def load(self, group: int, pages: list[int], rows: list[int]) -> Callable[[], None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            gathered = self._rows_of(group, len(pages))
            for first, count, row in _runs(rows):
                source = self._host(group, row, count)
                gathered[first : first + count].view(torch.uint8).copy_(source, non_blocking=True)
            self._gathers[group].scatter(gathered, self._index(pages))
            return self._done()

    def _rows_of(self, group: int, count: int) -> Tensor:
        words = self._gathers[group].row_words
        return self._buffer[: count * words].view(count, words)

    def _host(self, group: int, row: int, count: int) -> Tensor:
        """[count, n] uint8, neighbouring rows of host memory."""
        return self._rows.groups[group][row : row + count]

    def _index(self, pages: list[int]) -> Tensor:
        index = torch.tensor(pages, dtype=torch.int64).pin_memory()
        return index.to(self._device, non_blocking=True)

    def _done(self) -> Callable[[], None]:
        # The thread sleeps until the copy is done; it does not spin.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize


def _runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbouring rows together: (first place, how many, first row)."""
    ends = [i for i, (a, b) in enumerate(pairwise(rows), 1) if b != a + 1]
    bounds = [0, *ends, len(rows)]
    return [(a, b - a, rows[a]) for a, b in pairwise(bounds)]
