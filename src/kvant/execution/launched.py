"""A step that was launched: whether it is the one that is wanted, and what it came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvant.execution.decodes import Decodes
from kvant.execution.pieces import Pieces
from kvant.execution.recorder import Mark
from kvant.execution.sampler import Greedy
from kvant.sampling.drawing import DrawParts


@dataclass(frozen=True, slots=True)
class Answered:
    """What a step came to, by row of its logits and by sequence.

    known: of every row. first_rows: each sequence's first one; one more for each of its drafts.
    """

    known: Greedy
    first_rows: list[int]
    drafts: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded step, or what finds the tokens of any step in the shared logits, and where its results are.

    found: int64, [3, T] numbers behind each other: tokens that were run, whether the largest of each row
    of logits is a finite number, and which token that is; then `next`, [3, n]: newest tokens, where
    they stand, and how many tokens each sequence had in this step.
    draw: of steps without drafts; changes which tokens were found, and the newest ones with them.
    """

    replay: Callable[[], None]
    logits: Tensor
    found: Tensor
    next: Tensor
    draw: DrawParts | None


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that runs or has run. numbers: of its sequences, by row. ends: as `Decodes`.

    results, next: the graph's, on the host once `done` is. chunks: as `Pieces`, of a step with pieces of
    prompts.
    """

    numbers: list[int]
    num_drafts: int
    ends: NDArray[np.int64]
    graph: Recorded
    results: Tensor
    next: Tensor
    done: Mark
    chunks: Mapping[int, tuple[int, int]] | None = None

    def answered(self, places: NDArray[np.int64]) -> Answered:
        """What it came to for the sequences at these rows. Waits for it."""
        self.done.synchronize()
        count = len(self.numbers)
        drafts: list[tuple[int, ...]] = [()] * len(places)
        if self.num_drafts:
            counts = self.next[2, :count].numpy()
            ends = counts.cumsum()
            first_rows = (ends - counts)[places].tolist()
            last = ends[places].tolist()
            ran, sound, chosen = self.results[:, : int(ends[-1])].numpy()
            drafts = [
                tuple(ran[first + 1 : end].tolist())
                for first, end in zip(first_rows, last, strict=True)
            ]
        else:  # a row each
            first_rows = places.tolist()
            sound, chosen = self.results[1:, :count].numpy()
        return Answered(((sound != 0).tolist(), chosen.tolist()), first_rows, drafts)

    def rows_of(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Where sequences stand here; -1 for those that do not."""
        if self.numbers == numbers:
            return np.arange(len(numbers))
        at = {number: row for row, number in enumerate(self.numbers)}
        return np.array([at.get(number, -1) for number in numbers], np.int64)


@dataclass(frozen=True, slots=True)
class Guess:
    """A step launched behind `before`, row by row from its rows `sources`, before anybody asked for it."""

    launched: Launched
    before: Launched
    sources: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Known once the step before is done."""
        self.before.done.synchronize()
        found: NDArray[np.int64] = self.before.next[1].numpy()[self.sources]
        return found

    def places_of(self, step: Decodes) -> NDArray[np.int64] | None:
        """Where a step's sequences stand in this one; None if it is another one."""
        launched = self.launched
        if launched.chunks is not None or launched.num_drafts != step.num_drafts:
            return None
        places = launched.rows_of(step.numbers)
        if (places < 0).any():
            return None
        is_same = np.array_equal(self.starts[places], step.starts)
        return places if is_same and (launched.ends[places] > step.starts).all() else None

    def rows_of(self, step: Pieces) -> NDArray[np.int64] | None:
        """The same of a step with pieces of prompts: the rows of its sequences."""
        known = self.launched.chunks
        if known is None or any(
            known.get(number) != chunk for number, chunk in step.chunks.items()
        ):
            return None
        return self.launched.rows_of(step.numbers)
