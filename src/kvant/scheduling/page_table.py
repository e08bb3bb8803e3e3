"""The page ids of every running sequence as rows of one array, kept up to date as pages are added.

A row mirrors `Sequence.pages`, which is the truth; rebuilding padded tables in every step would cost
milliseconds at hundreds of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from kvant.kv.pages import SCRATCH


class PageTable:
    """num_rows rows of up to max_pages page ids; what lies behind a sequence's end is the scratch page."""

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self._table: NDArray[np.int32] = np.full((num_rows, max_pages), SCRATCH, dtype=np.int32)
        self._num_pages = np.zeros(num_rows, np.int64)
        self._most_tokens = np.zeros(num_rows, np.int64)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def max_pages(self) -> int:
        return int(self._table.shape[1])

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def take_row(self, most_tokens: int) -> int:
        """A row for a sequence that never stores more than so many tokens."""
        row = self._free_rows.pop()
        self._most_tokens[row] = most_tokens
        return row

    def write(self, row: int, start: int, pages: Items[int]) -> None:
        """Set a row's last entries, from `start` on."""
        end = start + len(pages)
        if len(pages) == 1:
            self._table[row, start] = pages[0]  # in a tenth of the time
        else:
            self._table[row, start:end] = pages
        self._num_pages[row] = end

    def append(self, rows: Items[int], pages: Items[int]) -> None:
        """A page each behind the last one of rows."""
        at = np.array(rows, np.int64)
        self._table[at, self._num_pages[at]] = pages
        self._num_pages[at] += 1

    def give_back_row(self, row: int, num_pages: int) -> None:
        """The row's first `num_pages` entries are cleared: no later owner can see them."""
        self._table[row, :num_pages] = SCRATCH
        self._num_pages[row] = 0
        self._free_rows.append(row)

    def rows(self, rows: NDArray[np.int64], num_pages: int) -> NDArray[np.int32]:
        """A copy [len(rows), num_pages] int32 of some rows' beginnings."""
        return self._table[rows, :num_pages]

    def room(self, rows: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
        """Tokens that sequences can store, with the pages they have and as they may: [len(rows)]."""
        return np.minimum(self._num_pages[rows] * page_size, self._most_tokens[rows])

    def row(self, row: int) -> NDArray[np.int32]:
        """A view of one whole row."""
        found: NDArray[np.int32] = self._table[row]
        return found
