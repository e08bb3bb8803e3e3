"""Chooses which states of recurrent layers are kept for later prompts, and which are dropped. No tensors.

A prompt's state is kept at every multiple of a stride and at the end of its last whole page. Kept states form
a tree: a state's parent is the nearest earlier kept state of the prompt. Above the limit, states are dropped:

    first    states with a later one in their prompt, from which no sequence continued: the one with the
             lowest ratio of two distances, to its parent and to the end of its longest prompt. So the
             distances between a prompt's states grow exponentially from its end to its beginning.
    then     the least recently used of the other states: ends of prompts, and places where prompts diverge.

So a long prompt does not evict the last state of another prompt: it loses states of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvant.kv.pages import PageAllocator
from kvant.scheduling.request import FinishReason, Sequence

LEAST_TOKENS = 128
"""The fewest tokens from a kept state to the end of a prompt that is kept too. A cut costs one more step."""


@dataclass(slots=True)
class _Kept:
    """One kept state.

    number: of the sequence that kept it, -1 if it came from a tier. place: number of pages before it, 0 while
    unknown. before: its parent's hash. is_used: whether a sequence continued from it.
    """

    number: int
    place: int = 0
    before: bytes | None = None
    is_used: bool = False


class KeptStates:
    """Keeps states of recurrent layers for later prompts that begin with the same tokens.

    pages: the allocator of state pages. A kept state is an idle page named by the hash of the tokens before
    it, so it may be evicted. most: the most states kept at once. stride: in tokens, a multiple of page_size.

    A sequence can continue from cached pages only at a place where a state was kept. Prompts are cut at
    multiples of the stride, and at the end of their last whole page unless that is close after such a place.
    """

    def __init__(self, pages: PageAllocator, most: int, *, stride: int, page_size: int) -> None:
        assert most
        assert stride % page_size == 0
        self._stride, self._page_size, self._most = stride, page_size, most
        self._pages = pages
        # By hash of the tokens before a state, least recently used first. Evicted states stay here until the
        # next check.
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    @property
    def num_kept(self) -> int:
        return sum(self._find(digest) is not None for digest in self._kept)

    def reach(self, sequence: Sequence, found: list[int]) -> list[int]:
        """Shortens a sequence's cached pages, `found`, to end at the last place with a kept state."""
        self._notice()
        hashes = sequence.prefix_hashes
        count = next((n for n in range(len(found), 0, -1) if self._find(hashes[n]) is not None), 0)
        return found[:count]

    def page_at(self, sequence: Sequence, num_pages: int) -> int | None:
        """Returns the page of the state kept after a sequence's first `num_pages` pages, or None."""
        return self._find(sequence.prefix_hashes[num_pages])

    def use(self, sequence: Sequence, num_pages: int) -> int | None:
        """Returns the page of the kept state after a sequence's first `num_pages` pages, or None.

        num_pages: the length of `reach`'s result. Marks the state as recently used.
        """
        if not num_pages:
            return None
        digest = sequence.prefix_hashes[num_pages]
        one = self._kept[digest]
        if not one.place:
            self._place(one, sequence, num_pages)
        one.is_used = True
        self._kept.move_to_end(digest)
        page = self._find(digest)
        assert page is not None
        return page

    def room(self, sequence: Sequence, start: int, count: int) -> int:
        """Returns how many of `count` tokens from `start` a piece may have, to end where a state is kept."""
        since, end = start % self._stride, self._end(sequence)
        first = start if sequence.num_cached_tokens is None else sequence.num_cached_tokens
        kept = max(start - since, first)
        room = self._stride - since
        if end > start and end - kept >= LEAST_TOKENS:
            room = min(room, end - start)
        return min(count, room)

    def keep(self, sequence: Sequence, end: int) -> int | None:
        """Returns a page to store the state after a piece that ends at token `end`, or None to keep none.

        The page may be evicted from the next step on, like any idle page.
        """
        if end % self._stride and end != self._end(sequence):
            return None
        place = end // self._page_size
        if not 0 < place < len(sequence.prefix_hashes):
            return None  # the place has no hash, since the sequence shares no contents
        digest = sequence.prefix_hashes[place]
        if self._find(digest) is not None:
            self._notice()
            self._kept.move_to_end(digest)
            return None
        self._notice()
        one = self._kept[digest] = _Kept(sequence.number)
        self._place(one, sequence, place)
        while len(self._kept) > self._most:
            self._forget(self._least())
        if digest not in self._kept:
            return None  # `_least` chose the new state
        taken = self._pages.allocate(1)
        if taken is None:
            self._drop(digest)
            return None  # running sequences hold all memory
        self._pages.remember(taken[0], digest)
        self._pages.release(taken)
        return taken[0]

    def forget(self, sequence: Sequence, reason: FinishReason) -> None:
        """Drops states that the ended sequence may have filled with wrong values; see `HeldPages.forget`."""
        if reason is FinishReason.NUMERICAL_ERROR:
            spoilt = [digest for digest in sequence.prefix_hashes if digest in self._kept]
        elif reason is FinishReason.CANCELLED:
            number = sequence.number
            spoilt = [digest for digest, one in self._kept.items() if one.number == number]
        else:
            return
        for digest in spoilt:
            self._forget(digest)

    def audit(self) -> list[str]:
        """Checks the number of kept states, and that each is found by its hash. Returns faults in words."""
        self._notice()
        known = self._pages.num_known
        faults = (
            [] if known == self.num_kept else [f"{known} states kept, {self.num_kept} findable"]
        )
        for one in self._kept.values():
            before = None if one.before is None else self._kept.get(one.before)
            if one.before is not None and (before is None or not before.place < one.place):
                faults.append("a kept state comes after one that is not kept before it")
        return faults + ([f"{known} states are kept"] if known > self._most else [])

    def _notice(self) -> None:
        """Drops the records of evicted states, adds states that came back from a tier, and keeps `most`."""
        for old in [old for old in self._kept if self._find(old) is None]:
            self._drop(old)
        for digest, _ in self._pages.known():
            self._kept.setdefault(digest, _Kept(-1))
        while len(self._kept) > self._most:
            self._forget(self._least())

    def _place(self, one: _Kept, sequence: Sequence, place: int) -> None:
        """Adds a kept state to the tree, at the end of the sequence's first `place` pages."""
        hashes = sequence.prefix_hashes
        one.place = place
        one.before = next(
            (hashes[n] for n in range(place - 1, 0, -1) if hashes[n] in self._kept), None
        )
        if one.before is not None and not self._kept[one.before].place:
            self._place(self._kept[one.before], sequence, hashes.index(one.before))
        for digest, other in self._kept.items():
            at = other.place
            behind = place < at < len(hashes) and other.before == one.before
            if (
                behind and hashes[at] == digest
            ):  # it has equal earlier tokens, so this is its parent
                other.before = hashes[place]

    def _least(self) -> bytes:
        """Returns the hash of the state to drop next."""
        ends: dict[bytes, int] = {}  # state -> last kept place of its longest prompt
        for digest, one in sorted(self._kept.items(), key=lambda item: -item[1].place):
            end = ends.setdefault(digest, one.place)
            if one.before is not None:
                ends[one.before] = max(ends.get(one.before, 0), end)
        costs = {
            digest: self._gap(one) / (ends[digest] - one.place)
            for digest, one in self._kept.items()
            if one.place < ends[digest] and not one.is_used
        }
        if costs:
            return min(costs, key=lambda digest: costs[digest])
        return next(iter(self._kept))

    def _gap(self, one: _Kept) -> int:
        """Returns the number of pages between a state and its parent, or the beginning of the prompt."""
        return one.place - (0 if one.before is None else self._kept[one.before].place)

    def _find(self, digest: bytes) -> int | None:
        return self._pages.find(digest)

    def _forget(self, digest: bytes) -> None:
        page = self._find(digest)
        if page is not None:
            self._pages.forget((page,))
        self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        """Removes a state from the tree. Its parent becomes its children's parent."""
        gone = self._kept.pop(digest)
        for other in self._kept.values():
            if other.before == digest:
                other.before = gone.before

    def _end(self, sequence: Sequence) -> int:
        """Returns the token position at which the last whole page before a prompt's last token ends."""
        return (sequence.num_prompt_tokens - 1) // self._page_size * self._page_size
