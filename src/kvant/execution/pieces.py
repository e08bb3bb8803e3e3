"""A step with pieces of prompts whose every token the device finds, so that it can be launched, and
followed, before anybody has read what the step before came to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvant.execution.batch import Batch, build_batch
from kvant.execution.decodes import Draws, list_draws
from kvant.scheduling.page_table import PageTable
from kvant.scheduling.schedule import Chunk


@dataclass(frozen=True, slots=True)
class Pieces:
    """chunks: start and number of tokens of each, by the sequence's number.

    num_unknown: the first chunks are one token each, which the step before finds; their ids in the batch
    mean nothing. numbers: of the sequences that get a token, in order of the logits' rows. starts: [n]
    int64, where the last token that each of them has stands.
    batch, draws: made for whoever launches the step, and not where it was launched already; draws as in
    `Decodes`, of this step.
    """

    chunks: Mapping[int, tuple[int, int]]
    num_unknown: int
    numbers: list[int]
    starts: NDArray[np.int64]
    batch: Callable[[], Batch]
    draws: Callable[[], Draws | None]


def list_pieces(
    chunks: Items[Chunk], page_table: PageTable, page_size: int, *, num_unknown: int = 0
) -> Pieces:
    """Of chunks without drafts."""
    sampling = [c for place, c in enumerate(chunks) if place < num_unknown or c.samples]
    return Pieces(
        {c.sequence.number: (c.start, c.num_tokens) for c in chunks},
        num_unknown,
        [c.sequence.number for c in sampling],
        np.array([c.start + c.num_tokens - 1 for c in sampling], np.int64),
        partial(build_batch, chunks, page_table, page_size, num_unknown=num_unknown),
        partial(list_draws, [c.sequence for c in sampling], num_unknown),
    )
