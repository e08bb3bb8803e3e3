"""Pages of running sequences: allocated, shared between equal prefixes, offered to the cache, released.

The scheduler decides who gets pages. This module applies it to page ids, rows and prefix hashes.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from kvant.kv.pages import PageAllocator, page_hash
from kvant.scheduling.request import FinishReason, Sequence
from kvant.scheduling.row_table import RowTable


class HeldPages:
    """The scheduler's pages and rows.

    prefix_caching: whether pages are shared by their contents. max_num_seqs: sequences that hold pages
    at once. Changes sequences: `pages`, `row` and their hashes.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        prefix_caching: bool,
    ) -> None:
        self.allocator = allocator
        self._page_size = page_size
        self._prefix_caching = prefix_caching
        self.table = RowTable(max_num_seqs, self.count_for(max_model_len))

    def count_for(self, num_tokens: int) -> int:
        """Pages for `num_tokens` tokens."""
        return -(-num_tokens // self._page_size)

    # -- allocation ----------------------------------------------------------------------------

    def admit(self, sequence: Sequence, found: list[int], *, spare: int) -> bool:
        """Give a sequence a row, and pages for every known token. False, and no change, without room.

        found: cached pages of its first tokens, which it shares. spare: pages that must stay free.
        """
        needed = self.count_for(sequence.num_tokens) - len(found)
        available = self.allocator.num_available - self.allocator.num_idle_among(found)
        if needed > available - spare:
            return False
        self.allocator.join(found)
        fresh = self.allocator.allocate(needed)
        assert fresh is not None
        sequence.pages = found + fresh
        num_cached_tokens = len(found) * self._page_size
        sequence.row = self.table.take_row(sequence, num_cached_tokens)
        self.table.write(sequence.row, 0, sequence.pages)
        sequence.num_remembered_pages = len(found)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached_tokens
        return True

    def extend(self, sequence: Sequence, count: int) -> bool:
        """Allocate more pages for a running sequence. False, and no change, if there are too few."""
        pages = self.allocator.allocate(count)
        if pages is None:
            return False
        self.table.write(sequence.row, len(sequence.pages), pages)
        sequence.pages += pages
        return True

    def extend_all(self, sequences: Items[Sequence]) -> bool:
        """One more page for each of some sequences. False, and no change, if there are too few."""
        pages = self.allocator.allocate(len(sequences))
        if pages is None:
            return False
        for sequence, page in zip(sequences, pages, strict=True):
            self.table.write(sequence.row, len(sequence.pages), (page,))
            sequence.pages.append(page)
        return True

    def release(self, sequence: Sequence) -> None:
        """Take back all pages and the row."""
        self.table.free_row(sequence.row)
        self.allocator.release(sequence.pages)
        sequence.pages = []
        sequence.row = -1
        sequence.num_remembered_pages = 0

    # -- the prefix cache ----------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached pages of its first tokens, never of all: the last token must run to be followed.

        Empty for a prompt whose log-probabilities are still to be computed: every token must run.
        """
        if not self._prefix_caching:
            return []
        most = (sequence.num_tokens - 1) // self._page_size
        self._hash(sequence, most)
        if sequence.lacks_prompt_logprobs:
            return []
        return self.allocator.match(sequence.prefix_hashes[1 : most + 1])

    def are_mostly_computed(self, sequence: Sequence, known: int, others: Items[Sequence]) -> bool:
        """Whether one of the others is computing most of what it has to run now, in full pages.

        known: its first pages that are cached already.
        """
        if not others or not self._prefix_caching or sequence.lacks_prompt_logprobs:
            return False
        hashes, left = sequence.prefix_hashes, sequence.num_tokens - known * self._page_size
        common = max(_num_common(hashes, other.prefix_hashes) for other in others) - 1
        return (common - known) * self._page_size * 2 > left

    def remember(self, sequence: Sequence, num_tokens: int) -> None:
        """Offer the full pages of its first `num_tokens` tokens to the cache.

        They must have been computed, and a finite token must have followed them.
        """
        if not self._prefix_caching:
            return
        full = num_tokens // self._page_size
        self._hash(sequence, full)
        for index in range(sequence.num_remembered_pages, full):
            digest = sequence.prefix_hashes[index + 1]
            if self.allocator.remember(sequence.pages[index], digest):
                sequence.own_hashes.append(digest)
        sequence.num_remembered_pages = max(full, sequence.num_remembered_pages)

    def forget(self, sequence: Sequence, reason: FinishReason) -> None:
        """Remove from the cache what a sequence that ended for this reason may have spoilt.

        See `Scheduler.finish`.
        """
        if reason is FinishReason.NUMERICAL_ERROR:
            self.allocator.forget(sequence.pages)
        if reason in (FinishReason.NUMERICAL_ERROR, FinishReason.CANCELLED):
            for digest in sequence.own_hashes:
                self.allocator.forget(self.allocator.match((digest,)))

    def _hash(self, sequence: Sequence, count: int) -> None:
        """Extend its chain of hashes to its first `count` pages."""
        hashes, page_size = sequence.prefix_hashes, self._page_size
        for index in range(len(hashes) - 1, count):
            tokens = sequence.token_ids[index * page_size : (index + 1) * page_size]
            hashes.append(page_hash(hashes[-1], tokens))

    # -- checking ------------------------------------------------------------------------------

    def audit(self, holders: Items[Sequence]) -> list[str]:
        """Recompute pages, counts and rows of all sequences that hold some. Returns faults in words."""
        table = self.table
        faults = self.allocator.audit([sequence.pages for sequence in holders])
        rows = [sequence.row for sequence in holders]
        if len(set(rows)) != len(rows):
            faults.append("two sequences share a row of the page table")
        if len(rows) + table.num_free_rows != table.num_rows:
            faults.append("rows of the page table were lost")
        for sequence in holders:
            row = sequence.row
            pages = table.pages[row].tolist()
            number = sequence.number
            if pages[: len(sequence.pages)] != sequence.pages or any(pages[len(sequence.pages) :]):
                faults.append(f"request {number}: its row differs from its pages")
            if table.owner[row] != number or table.num_pages[row] != len(sequence.pages):
                faults.append(f"request {number}: its row belongs to another sequence")
            num_computed = int(table.num_computed[row] - table.num_uncertain[row])
            if self.count_for(num_computed) > len(sequence.pages):
                faults.append(f"request {number}: more tokens computed than its pages hold")
            if table.num_tokens[row] - table.num_pending[row] != sequence.num_tokens:
                faults.append(f"request {number}: its row counts other tokens than it has")
        return faults


def _num_common(a: list[bytes], b: list[bytes]) -> int:
    """Length of the common beginning of two chains, in which equal entries have equal beginnings."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
