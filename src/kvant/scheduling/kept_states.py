"""States of recurrent layers that are kept for prompts with equal beginnings. No tensors: slots and hashes.

A sequence continues from cached pages only where a state was kept that its beginning leaves behind. States
are kept at multiples of a stride and where a prompt's last whole page ends; prompts are cut there. A slot
holds one state of every layer; the slot that was used least recently is taken for the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items

from kvant.scheduling.request import FinishReason, Sequence

LEAST_TOKENS = 128
"""Shorter prompts are computed again: keeping their state costs a step of its own."""


class KeptStates:
    """num_slots states. stride: tokens, a multiple of page_size. With no slots nothing is kept or cut."""

    def __init__(self, num_slots: int, *, stride: int, page_size: int) -> None:
        assert not num_slots or stride % page_size == 0
        self._stride, self._page_size = stride, page_size
        self._free = list(range(num_slots - 1, -1, -1))
        self._is_on = num_slots > 0
        # Slot and number of the sequence that kept it, by the hash of its pages; oldest use first.
        self._slots: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    @property
    def num_kept(self) -> int:
        return len(self._slots)

    def reach(self, sequence: Sequence, found: list[int]) -> list[int]:
        """The first of its cached pages, up to the last place whose state is kept."""
        if not self._is_on:
            return found
        hashes = sequence.prefix_hashes
        count = next((n for n in range(len(found), 0, -1) if hashes[n] in self._slots), 0)
        return found[:count]

    def use(self, sequence: Sequence, num_pages: int) -> int:
        """The slot of the state behind a sequence's first pages, which `reach` found."""
        digest = sequence.prefix_hashes[num_pages]
        self._slots.move_to_end(digest)
        return self._slots[digest][0]

    def room(self, sequence: Sequence, start: int, count: int) -> int:
        """Tokens of a piece from `start`, at most `count`: up to the next place whose state is kept."""
        if not self._is_on:
            return count
        places = [start - start % self._stride + self._stride, self._end(sequence)]
        return min([count, *(place - start for place in places if place > start)])

    def keep(self, sequence: Sequence, end: int) -> int | None:
        """A slot for the state that a piece up to `end` leaves behind; None where none is to be kept."""
        if not self._is_on or (end % self._stride and end != self._end(sequence)):
            return None
        place = end // self._page_size
        if not 0 < place < len(sequence.prefix_hashes):
            return None  # it is not hashed, as its contents are not shared
        digest = sequence.prefix_hashes[place]
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return None
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1][0]
        self._slots[digest] = slot, sequence.number
        return slot

    def forget(self, sequence: Sequence, reason: FinishReason) -> None:
        """Drop what a sequence that ended for this reason may have spoilt, as `HeldPages.forget` does."""
        if reason is FinishReason.NUMERICAL_ERROR:
            spoilt = [digest for digest in sequence.prefix_hashes if digest in self._slots]
        elif reason is FinishReason.CANCELLED:
            number = sequence.number
            spoilt = [digest for digest, (_, by) in self._slots.items() if by == number]
        else:
            return
        for digest in spoilt:
            self._free.append(self._slots.pop(digest)[0])

    def audit(self, num_slots: int) -> list[str]:
        """Faults in words: every slot is free or kept once."""
        slots = [*self._free, *(slot for slot, _ in self._slots.values())]
        return [] if sorted(slots) == list(range(num_slots)) else ["slots of states were lost"]

    def _end(self, sequence: Sequence) -> int:
        """Where the last whole page before a prompt's last token ends; 0 for a prompt that is short."""
        count = sequence.num_prompt_tokens
        if count < LEAST_TOKENS:
            return 0
        return (count - 1) // self._page_size * self._page_size


def rows_and_slots(copies: Items[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Both sides of (from, to) copies."""
    return [a for a, _ in copies], [b for _, b in copies]
