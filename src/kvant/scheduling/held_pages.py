"""The pages that sequences hold: taken, shared where beginnings are the same, offered to others, given back.

Who gets pages is the scheduler's to say; what that means for page ids, their owners, the page table and
the hashes by which others find them is here.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from kvant.kv.pages import PageAllocator, page_hash
from kvant.scheduling.page_table import PageTable
from kvant.scheduling.request import FinishReason, Sequence


class HeldPages:
    """prefix_caching: whether pages are shared by their contents. max_num_seqs: that hold pages at once.

    Changes sequences: `pages`, `row`, how far they are when pages come or go, and their hashes.
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
        self._max_num_seqs = max_num_seqs
        self._prefix_caching = prefix_caching
        self.table = PageTable(max_num_seqs, self.count_for(max_model_len))

    def count_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    # -- coming and going ----------------------------------------------------------------------

    def give(self, sequence: Sequence, found: list[int], *, spare: int) -> bool:
        """Pages for every known token, those `found` of its beginning shared; False if there are too few.

        spare: so many stay free.
        """
        needed = self.count_for(sequence.num_tokens) - len(found)
        available = self.allocator.num_available - self.allocator.num_idle_among(found)
        if needed > available - spare:
            return False
        self.allocator.join(found)
        fresh = self.allocator.allocate(needed)
        assert fresh is not None
        sequence.pages = found + fresh
        # The last token that a sequence may have is never run.
        sequence.row = self.table.take_row(sequence.request.max_total_tokens - 1)
        self.table.write(sequence.row, 0, sequence.pages)
        sequence.num_computed_tokens = len(found) * self._page_size
        sequence.num_remembered_pages = len(found)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def extend(self, sequence: Sequence, count: int) -> bool:
        """More pages for one that holds some; False, and no change, if there are not that many."""
        pages = self.allocator.allocate(count)
        if pages is None:
            return False
        self.table.write(sequence.row, len(sequence.pages), pages)
        sequence.pages += pages
        return True

    def grow_early(self, sequence: Sequence, after: int | None = None) -> None:
        """The page of a token, if it needs one and nobody has to give it up.

        after: where the token stands, by default that of the token after next.
        """
        after = sequence.num_tokens if after is None else after
        if (
            after < sequence.request.max_total_tokens - 1
            and after == len(sequence.pages) * self._page_size
        ):
            self.extend(sequence, 1)

    def grow_all_early(self, sequences: Items[Sequence]) -> None:
        """`grow_early` of sequences each of which needs a page."""
        pages = self.allocator.allocate(len(sequences))
        if pages is None:  # who comes first has them
            for sequence in sequences:
                self.grow_early(sequence)
            return
        for sequence, page in zip(sequences, pages, strict=True):
            sequence.pages.append(page)
        self.table.append([sequence.row for sequence in sequences], pages)

    def take_back(self, sequence: Sequence) -> None:
        """All of them: none of its tokens is computed then."""
        self.table.give_back_row(sequence.row, len(sequence.pages))
        self.allocator.release(sequence.pages)
        sequence.pages = []
        sequence.row = -1
        sequence.num_computed_tokens = 0
        sequence.num_remembered_pages = 0
        sequence.is_followed = False

    # -- what others find ----------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Known pages of its beginning. Never all its tokens: the last one must run to be followed.

        None for a prompt whose log-probabilities are still to be computed: every token must run.
        """
        if not self._prefix_caching:
            return []
        most = (sequence.num_tokens - 1) // self._page_size
        self._hash(sequence, most)
        if sequence.lacks_prompt_logprobs:
            return []
        return self.allocator.match(sequence.prefix_hashes[1 : most + 1])

    def are_mostly_computed(self, sequence: Sequence, known: int, others: Items[Sequence]) -> bool:
        """Whether most of what it has to run is being run for one of the others now, in full pages.

        known: pages of its beginning that can be found.
        """
        if not others or not self._prefix_caching or sequence.lacks_prompt_logprobs:
            return False
        hashes, left = sequence.prefix_hashes, sequence.num_tokens - known * self._page_size
        common = max(_num_common(hashes, other.prefix_hashes) for other in others) - 1
        return (common - known) * self._page_size * 2 > left

    def remember(self, sequence: Sequence) -> None:
        """Offer its full pages to the prefix cache, unless nobody knows that they hold numbers."""
        if not sequence.is_followed or not self._prefix_caching:
            return
        full = sequence.num_computed_tokens // self._page_size
        self._hash(sequence, full)
        for index in range(sequence.num_remembered_pages, full):
            digest = sequence.prefix_hashes[index + 1]
            if self.allocator.remember(sequence.pages[index], digest):
                sequence.own_hashes.append(digest)
        sequence.num_remembered_pages = full

    def forget(self, sequence: Sequence, reason: FinishReason) -> None:
        """Of one that ends for this reason, what nobody is to find: see `Scheduler.finish`."""
        if reason is FinishReason.NUMERICAL_ERROR:
            self.allocator.forget(sequence.pages)
        if reason in (FinishReason.NUMERICAL_ERROR, FinishReason.CANCELLED):
            for digest in sequence.own_hashes:
                self.allocator.forget(self.allocator.match((digest,)))

    def _hash(self, sequence: Sequence, count: int) -> None:
        """Extend the chain of hashes to its first `count` pages."""
        hashes, page_size = sequence.prefix_hashes, self._page_size
        for index in range(len(hashes) - 1, count):
            tokens = sequence.token_ids[index * page_size : (index + 1) * page_size]
            hashes.append(page_hash(hashes[-1], tokens))

    # -- checking ------------------------------------------------------------------------------

    def audit(self, holders: Items[Sequence]) -> list[str]:
        """Recompute pages, counts and rows of all that hold some; what does not add up, in words."""
        faults = self.allocator.audit([sequence.pages for sequence in holders])
        rows = [sequence.row for sequence in holders]
        if len(set(rows)) != len(rows):
            faults.append("two sequences share a row of the page table")
        if len(rows) + self.table.num_free_rows != self._max_num_seqs:
            faults.append("rows of the page table were lost")
        for sequence in holders:
            row = self.table.row(sequence.row).tolist()
            if row[: len(sequence.pages)] != sequence.pages or any(row[len(sequence.pages) :]):
                faults.append(f"request {sequence.number}: its row differs from its pages")
            if self.count_for(sequence.num_computed_tokens) > len(sequence.pages):
                faults.append(
                    f"request {sequence.number}: more tokens computed than its pages hold"
                )
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
