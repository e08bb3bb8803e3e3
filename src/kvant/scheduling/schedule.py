"""One step as the scheduler decided it: which tokens of which sequences run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvant.attention.need import LONG
from kvant.scheduling.request import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """n sequences: decodes first, oldest first, then pieces of prompts, long ones last.

    rows: [n] int64, rows of the row table. numbers: [n] int64, the sequences' numbers, which tell
    whether a row still has the same owner. starts: [n] int64, position of each first token; too high
    where drafts of a launched step are not verified yet: the device knows the position there.
    counts: [n] int64, tokens without drafts. samples: [n] bool, whether the last one is followed by a
    token that is not known yet. num_prefills: pieces of prompts, at the end.
    limits: [n] int64, -1 where the start is exact, else the first position that the sequence may not
    store; None where all starts are exact. is_pending: [n] bool, whether a launched step that was not
    read yet finds the sequence's newest token. max_drafts: [n] int64, drafts that each sequence has
    room for, or None. num_drafts: the largest of them, as it was asked for.
    needs_host: whether the host must compute something between this step's logits and its tokens.
    pages_to_zero: cleared before the step. preempted: sequences that lost their pages for it.
    """

    sequences: list[Sequence]
    rows: NDArray[np.int64]
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    samples: NDArray[np.bool_]
    num_prefills: int
    limits: NDArray[np.int64] | None
    is_pending: NDArray[np.bool_]
    max_drafts: NDArray[np.int64] | None
    num_drafts: int
    needs_host: bool
    pages_to_zero: list[int]
    preempted: list[Sequence]

    @property
    def num_decodes(self) -> int:
        return len(self.sequences) - self.num_prefills

    @property
    def most_tokens(self) -> NDArray[np.int64]:
        """[n] int64, tokens that each sequence gets if all drafts are accepted."""
        if self.max_drafts is None:
            return self.samples.astype(np.int64)
        return np.where(self.samples, 1 + self.max_drafts, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step without drafts."""
        return int(self.counts.sum())


def backend_order(start: int, num_tokens: int) -> tuple[int, int]:
    """Sort key for pieces: backends want long ones last, and pieces of one kind and size together."""
    if num_tokens < LONG:
        return 0, 0
    return 2 - (start > 0), num_tokens
