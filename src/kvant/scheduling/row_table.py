"""What the engine knows of every running sequence, as arrays with one row per sequence.

A sequence keeps its row from admission until it ends or is preempted. The device keeps the newest
token, the length, the page table and the sampling parameters of the same rows
(`kvant.execution.device_state`), so a step needs only row numbers from the host.

The scheduler is the only writer. A step that was launched and not read yet counts as if it had run:
`num_computed` and `num_tokens` are what they will be if every draft is accepted, and at most
`num_uncertain` too high.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from kvant.kv.pages import SCRATCH
from kvant.sampling.random_numbers import wishes
from kvant.scheduling.request import Sequence


class RowTable:
    """num_rows rows. All arrays are [num_rows].

    pages: [num_rows, max_pages] int32; entries behind a sequence's last page are the scratch page.
    num_pages: pages of each row. owner: the sequence's number, -1 for a free row.
    num_computed: tokens whose K and V are in the pages once every launched step has run.
    num_tokens: known tokens, and tokens that launched steps will find.
    num_pending: those of `num_tokens` that launched steps will find.
    num_uncertain: drafts in launched steps, which may be rejected.
    is_followed: whether a finite token followed the prompt, so that its pages may be shared.
    max_tokens: prompt and answer together. num_prompt: tokens of the prompt.
    needs_host: the next token depends on rules or log-probabilities that the host computes.
    sampling [num_rows, 4] (`random_numbers.wishes`), seeds: how tokens are drawn.
    log: (row, first column, page ids) of every change of `pages`, once `start_log` was called.
    """

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self.pages: NDArray[np.int32] = np.full((num_rows, max_pages), SCRATCH, dtype=np.int32)
        self.num_pages = np.zeros(num_rows, np.int64)
        self.owner = np.full(num_rows, -1, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_uncertain = np.zeros(num_rows, np.int64)
        self.num_pending = np.zeros(num_rows, np.int64)
        self.is_followed = np.zeros(num_rows, np.bool_)
        self.max_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.needs_host = np.zeros(num_rows, np.bool_)
        self.sampling = np.tile(np.array([0.0, np.inf, 1.0, 0.0]), (num_rows, 1))
        self.seeds = np.zeros(num_rows, np.int64)
        self.log: list[tuple[int, int, Items[int]]] | None = None
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def is_greedy(self) -> NDArray[np.bool_]:
        """Whether each row takes the most likely token."""
        found: NDArray[np.bool_] = self.sampling[:, 0] == 0.0
        return found

    @property
    def num_rows(self) -> int:
        return len(self.owner)

    @property
    def max_pages(self) -> int:
        return int(self.pages.shape[1])

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def start_log(self) -> None:
        """Record changes of `pages` from now on; the reader empties `log`."""
        self.log = []

    def take_row(self, sequence: Sequence, num_cached_tokens: int) -> int:
        """Give a sequence a row. num_cached_tokens: tokens whose K and V its first pages hold."""
        row = self._free_rows.pop()
        request, params = sequence.request, sequence.request.params
        self.owner[row] = sequence.number
        self.num_computed[row] = num_cached_tokens
        self.num_tokens[row] = len(sequence.token_ids)
        self.num_uncertain[row] = self.num_pending[row] = 0
        self.is_followed[row] = False
        self.max_tokens[row] = request.max_total_tokens
        self.num_prompt[row] = sequence.num_prompt_tokens
        self.needs_host[row] = sequence.needs_host
        self.sampling[row] = wishes(params)
        self.seeds[row] = request.seed
        return row

    def write(self, row: int, start: int, pages: Items[int]) -> None:
        """Set a row's last page ids, from column `start` on."""
        end = start + len(pages)
        if len(pages) == 1:
            self.pages[row, start] = pages[0]  # ten times as fast as a slice
        else:
            self.pages[row, start:end] = pages
        self.num_pages[row] = end
        if self.log is not None:
            self.log.append((row, start, pages))

    def free_row(self, row: int) -> None:
        """Take a row back. Its page ids are cleared, so no later owner can see them."""
        self.pages[row, : self.num_pages[row]] = SCRATCH
        self.num_pages[row] = 0
        self.owner[row] = -1
        self._free_rows.append(row)

    def page_table(self, rows: NDArray[np.int64], num_pages: int) -> NDArray[np.int32]:
        """A copy [len(rows), num_pages] of some rows' first page ids."""
        return self.pages[rows, :num_pages]

    def launched(
        self,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        samples: NDArray[np.bool_],
        max_drafts: NDArray[np.int64] | None,
    ) -> None:
        """Count a step as run. counts: tokens without drafts; samples: whether a token follows them."""
        if max_drafts is None:
            self.num_computed[rows] += counts
            self.num_tokens[rows] += samples
            self.num_pending[rows] += samples
        else:
            found = np.where(samples, 1 + max_drafts, 0)
            self.num_computed[rows] += counts + max_drafts
            self.num_tokens[rows] += found
            self.num_pending[rows] += found
            self.num_uncertain[rows] += max_drafts

    def read(
        self,
        rows: NDArray[np.int64],
        samples: NDArray[np.bool_],
        max_drafts: NDArray[np.int64] | None,
        missing: NDArray[np.int64] | None,
    ) -> None:
        """A launched step was read. missing: tokens that were counted and did not come."""
        if max_drafts is None:
            self.num_pending[rows] -= samples
        else:
            self.num_pending[rows] -= np.where(samples, 1 + max_drafts, 0)
            self.num_uncertain[rows] -= max_drafts
        if missing is not None:
            self.num_computed[rows] -= missing
            self.num_tokens[rows] -= missing
