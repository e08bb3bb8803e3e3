"""Running sequences on the device, one row each: the rows of the scheduler's row table.

A step reads its newest tokens, positions and page ids here and writes its new tokens here. So the next step
can be launched before the host has read them. Every rank has such rows with the same numbers, and a pool
of recurrent states finds a sequence's page by its row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.kernels.transfer import to_device
from kvant.scheduling.row_table import RowTable


class DeviceState:
    """Tensors with one row per running sequence, and a last row for padding with arbitrary contents.

    tokens: [num_rows + 1] int64, each sequence's newest token, which was not run yet. lengths:
    [num_rows + 1] int64, the position of that token. pages: [num_rows + 1, num_groups * max_pages] int32,
    the page tables of all groups side by side; entries after a sequence's end are never read. sampling:
    [num_rows + 1, 4] float64, `SamplingParams.numbers`.
    """

    def __init__(
        self, num_rows: int, max_pages: int, device: torch.device, num_groups: int = 1
    ) -> None:
        self.padding_row = num_rows
        self.tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.num_groups, self.max_pages = num_groups, max_pages
        self.pages = torch.zeros(
            num_rows + 1, num_groups * max_pages, dtype=torch.int32, device=device
        )
        self.sampling = torch.zeros(num_rows + 1, 4, dtype=torch.float64, device=device)
        self._sampling = np.zeros((num_rows, 4))  # the host's copy of `sampling`
        self._table: RowTable | None = None

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def pages_of(self, group: int) -> Tensor:
        """Returns a view [num_rows + 1, max_pages] of a group's page table."""
        return self.pages[:, group * self.max_pages : (group + 1) * self.max_pages]

    def changes(self, table: RowTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns page ids that changed since the last call, as flat indices into `pages` and values.

        Also sends new sequences' sampling parameters to the device. A table that is new here is copied
        whole, and starts to log its changes.
        """
        if table is not self._table:
            self._attach(table)
        log, table.log = table.log, []
        if not log:
            return _NONE, _NONE
        self._send_sampling(table, [row for row, start, _ in log if start == 0])
        width = self.pages.shape[1]
        index = np.concatenate(
            [row * width + start + np.arange(len(pages)) for row, start, pages in log]
        )
        values = np.array([page for _, _, pages in log for page in pages], np.int64)
        # A row may have changed its owner between two calls. Only the last change of an entry counts.
        if len({row for row, _, _ in log}) < len(log):
            index, last = np.unique(index[::-1], return_index=True)
            values = values[::-1][last]
        return index, values

    def write(self, index: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        """Writes page ids into the flattened `pages` without waiting for the device.

        index, values: [n] int64 on the host, as `changes` returns them.
        """
        if len(index):
            there = to_device(torch.from_numpy(np.stack([index, values])), self.device)
            self.pages.view(-1).index_put_((there[0],), there[1].to(torch.int32))

    def _attach(self, table: RowTable) -> None:
        rows, width = table.pages.shape
        pages = to_device(torch.from_numpy(table.pages.copy()), self.device)
        self.pages[:rows, :width].copy_(pages)
        self._table = table
        table.start_log()
        self._send_sampling(table, list(range(rows)))

    def _send_sampling(self, table: RowTable, rows: list[int]) -> None:
        changed = [r for r in rows if (self._sampling[r] != table.sampling[r]).any()]
        if changed:
            self._sampling[changed] = table.sampling[changed]
            there = to_device(torch.tensor(changed), self.device)
            values = to_device(torch.from_numpy(table.sampling[changed]), self.device)
            self.sampling.index_put_((there,), values)


_NONE = np.zeros(0, np.int64)
