"""The scheduler's arrays with one row per running sequence.

A sequence keeps its row from admission until it ends or is preempted. The device keeps the newest
token, the length, the page table and the sampling parameters under the same row numbers
(`kvant.execution.device_state`), so a step needs only row numbers from the host.

Only the scheduler writes here. A launched step counts as run before it is read:
`num_computed` and `num_tokens` assume that every draft is accepted, so they may be too high by up to
`num_uncertain`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from kvant.kv.pages import SCRATCH
from kvant.scheduling.request import Sequence


class RowTable:
    """Arrays with one row per running sequence. Arrays are [num_rows] unless another shape is given.

    pages: [num_rows, num_groups * max_pages] int32, the tables of all groups side by side; entries after a
    sequence's last page, and of released pages, are the scratch page.
    num_pages: pages that each row has in every group. owner: the sequence's number, -1 for a free row.
    num_computed: tokens whose K and V are in the pages once every launched step has run.
    num_tokens: known tokens plus tokens that launched steps will produce.
    num_pending: how many of `num_tokens` launched steps will produce.
    num_uncertain: drafts in launched steps, which may be rejected.
    is_followed: whether a finite token followed the prompt, so that its pages may be shared.
    max_tokens: the limit on prompt and answer together. num_prompt: tokens of the prompt.
    needs_host: the next token depends on rules or log-probabilities that the host computes.
    sampling: [num_rows, 4], `SamplingParams.numbers`. seeds: seeds of sampled tokens.
    log: (row, first column, page ids) of every change of `pages`, once `start_log` was called.
    """

    def __init__(self, num_rows: int, max_pages: int, num_groups: int = 1) -> None:
        self.num_groups, self.max_pages = num_groups, max_pages
        self.pages: NDArray[np.int32] = np.full(
            (num_rows, num_groups * max_pages), SCRATCH, dtype=np.int32
        )
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
        """[num_rows] bool, true where the temperature is 0."""
        found: NDArray[np.bool_] = self.sampling[:, 0] == 0.0
        return found

    @property
    def num_rows(self) -> int:
        return len(self.owner)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def start_log(self) -> None:
        """Starts to log changes of `pages`. The log's reader must empty it."""
        self.log = []

    def take_row(self, sequence: Sequence, num_cached_tokens: int) -> int:
        """Gives a sequence a row. num_cached_tokens: tokens whose K and V its first pages already hold."""
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
        self.sampling[row] = params.numbers
        self.seeds[row] = request.seed
        return row

    def write(self, row: int, start: int, pages: Items[int], group: int = 0) -> None:
        """Sets a row's page ids of a group from column `start` on, and with one group its `num_pages`."""
        if self.num_groups == 1:
            self.num_pages[row] = start + len(pages)
        self.overwrite(row, start, pages, group)

    def overwrite(self, row: int, start: int, pages: Items[int], group: int = 0) -> None:
        """Replaces some of a row's page ids of a group, from column `start` on."""
        start += group * self.max_pages
        end = start + len(pages)
        if len(pages) == 1:
            self.pages[row, start] = pages[0]  # ten times as fast as a slice
        else:
            self.pages[row, start:end] = pages
        if self.log is not None:
            self.log.append((row, start, pages))

    def free_row(self, row: int) -> None:
        """Frees a row. Its page ids are cleared, so no later owner can see them."""
        self.pages[row] = SCRATCH
        self.num_pages[row] = 0
        self.owner[row] = -1
        self._free_rows.append(row)

    def page_table(
        self, rows: NDArray[np.int64], num_pages: int, group: int = 0
    ) -> NDArray[np.int32]:
        """Returns a copy [len(rows), num_pages] of some rows' first page ids in a group."""
        first = group * self.max_pages
        return self.pages[rows, first : first + num_pages]

    def count_launched(
        self,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        samples: NDArray[np.bool_],
        max_drafts: NDArray[np.int64] | None,
    ) -> None:
        """Counts a launched step as run. All arrays are [n], one entry per row of the step.

        counts: tokens without drafts. samples: whether the step produces a token after them. max_drafts: the
        most drafts, None for a step without any.
        """
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

    def count_read(
        self,
        rows: NDArray[np.int64],
        samples: NDArray[np.bool_],
        max_drafts: NDArray[np.int64] | None,
        missing: NDArray[np.int64] | None,
    ) -> None:
        """Corrects the counts of a step that was read. missing: [n], tokens counted but not produced."""
        if max_drafts is None:
            self.num_pending[rows] -= samples
        else:
            self.num_pending[rows] -= np.where(samples, 1 + max_drafts, 0)
            self.num_uncertain[rows] -= max_drafts
        if missing is not None:
            self.num_computed[rows] -= missing
            self.num_tokens[rows] -= missing
