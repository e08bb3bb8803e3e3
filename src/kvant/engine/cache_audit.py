"""Check the prefix cache while nothing runs: do its pages still have the scales that were written?"""

from __future__ import annotations

from kvant.kv.pages import PageAllocator
from kvant.kv.scale_audit import ScaleAudit

SLICE_BYTES = 2 * 2**20
"""Bytes of scales per check: some milliseconds, which delay a request that arrives meanwhile."""


class CacheAudit:
    """Goes through the known pages round and round, a slice at each call. Only between two steps.

    A page's sum is noted the first time, and compared from then on until the page has another owner,
    who may write the same tokens with other roundings. What is found wrong empties the whole prefix
    cache: a reader of that page since the last check may have added pages of its own.
    """

    def __init__(self, allocator: PageAllocator, scales: ScaleAudit) -> None:
        self._allocator = allocator
        self._scales = scales
        self._most = max(1, SLICE_BYTES // max(1, scales.page_bytes))
        self._noted: dict[int, tuple[int, int]] = {}  # generation and sum, by page
        self._next = 0

    def check(self) -> list[str]:
        """What is wrong, in words; [] if all is well. Afterwards no request finds any of it."""
        found = self._scales.restore()
        pages = self._slice()
        for (page, generation), total in zip(
            pages, self._scales.sums([page for page, _ in pages]), strict=True
        ):
            noted = self._noted.get(page)
            if total is None:
                found.append(f"page {page} has a scale that is no number")
            elif noted is None or noted[0] != generation:
                self._noted[page] = generation, total
            elif noted[1] != total:
                found.append(f"page {page} has other scales than when it was written")
        if found:
            self._allocator.forget_all()
            self._noted.clear()
        return found

    def accept(self) -> None:
        """Scales outside the pages are meant to be as they are now."""
        self._scales.accept()

    def _slice(self) -> list[tuple[int, int]]:
        """The next known pages, as many as one call may look at; from the start again after the last."""
        if not self._scales.page_bytes:
            return []
        found: list[tuple[int, int]] = []
        for page in range(self._next, self._allocator.num_usable + 1):
            if len(found) == self._most:
                self._next = page
                return found
            generation = self._allocator.generation_of(page)
            if generation is None:
                self._noted.pop(page, None)
            else:
                found.append((page, generation))
        self._next = 0
        return found
