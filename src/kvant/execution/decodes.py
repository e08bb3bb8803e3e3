"""A step of answering sequences alone, as a few numbers of each: all that a recorded step needs.

The rest (positions, slots, lengths) follows from them on the device: `kvant.execution.layout`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvant.sampling.drawing import uniforms, wishes
from kvant.scheduling.page_table import PageTable
from kvant.scheduling.request import Sequence
from kvant.scheduling.schedule import Chunk


@dataclass(frozen=True, slots=True)
class Draws:
    """How each sequence's tokens are drawn, while each gets one token a step.

    table: [n, 5] float64, `Draw.numbers` but for u. drawn: [m] int64, those that do not take the likeliest
    token. seeds: theirs. places: [m] int64, of the token that this step finds, in its answer.
    """

    table: NDArray[np.float64]
    drawn: NDArray[np.int64]
    seeds: list[int]
    places: NDArray[np.int64]

    def numbers(self, later: int) -> NDArray[np.float64]:
        """[n, 5], as `Draw.numbers`, of the step that is so many later."""
        found = self.table.copy()
        found[self.drawn, 4] = uniforms(self.seeds, (self.places + later).tolist())
        return found

    def after(self) -> Draws:
        """Those of the next step."""
        return Draws(self.table, self.drawn, self.seeds, self.places + 1)


def list_draws(sequences: Items[Sequence], num_unknown: int = 0) -> Draws | None:
    """None where every one of them takes the likeliest token.

    num_unknown: the first ones get a token before this one, which is not known yet.
    """
    drawn = [place for place, s in enumerate(sequences) if not s.request.params.is_greedy]
    if not drawn:
        return None
    return Draws(
        np.array([(*wishes(sequence.request.params), 0.0) for sequence in sequences]),
        np.array(drawn, np.int64),
        [sequences[place].request.seed for place in drawn],
        np.array(
            [sequences[place].num_output_tokens + (place < num_unknown) for place in drawn],
            np.int64,
        ),
    )


@dataclass(frozen=True, slots=True)
class Decodes:
    """Each sequence's newest token, and room for drafts behind it.

    numbers: the sequences' own. num_drafts: of one sequence at most. ids, starts: [n] int64, the newest
    tokens and where they stand. ends: [n] int64, where the tokens of this step must end. limits: [n]
    int64, where those of any step must end, with the pages there are; None where nobody asks what
    follows. table: [n, pages] int32, pages up to the furthest end. draws: how tokens are drawn on the
    device; None where the likeliest are taken, or the host draws.
    """

    sequences: list[Sequence]
    numbers: list[int]
    num_drafts: int
    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    limits: NDArray[np.int64] | None
    table: NDArray[np.int32]
    draws: Draws | None = None


def list_decodes(
    chunks: Items[Chunk],
    page_table: PageTable,
    page_size: int,
    num_drafts: int,
    *,
    ahead: bool,
    draws: bool,
) -> Decodes:
    """Of chunks that are one token each. ahead: also what the next step may use. draws: on the device."""
    sequences, firsts, _, drafts, _ = zip(*chunks, strict=True)
    starts = np.array(firsts, np.int64)
    ends = starts + 1 + np.array(drafts, np.int64) if num_drafts else starts + 1
    # Lists first: numpy takes longer over what comes one by one.
    ids = np.array([s.token_ids[-1] for s in sequences], np.int64)
    rows = np.array([s.row for s in sequences], np.int64)
    numbers = [s.request.number for s in sequences]
    return make_decodes(
        list(sequences), numbers, ids, starts, ends, rows, page_table, page_size, num_drafts,
        ahead=ahead, draws=list_draws(sequences) if draws else None,
    )  # fmt: skip


def list_decodes_after(chunks: Items[Chunk], page_table: PageTable, page_size: int) -> Decodes:
    """For what follows a step of these chunks, each of which samples: its `limits` and `draws`, and as
    `ends` where the chunks end.
    """
    sequences = [c.sequence for c in chunks]
    ends = np.array([c.start + c.num_tokens for c in chunks], np.int64)
    rows = np.array([s.row for s in sequences], np.int64)
    ids = np.zeros(len(chunks), np.int64)
    return make_decodes(
        sequences, [s.number for s in sequences], ids, ends - 1, ends, rows, page_table, page_size, 0,
        ahead=True, draws=list_draws(sequences),
    )  # fmt: skip


def make_decodes(
    sequences: list[Sequence],
    numbers: list[int],
    ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    rows: NDArray[np.int64],
    page_table: PageTable,
    page_size: int,
    num_drafts: int,
    *,
    ahead: bool,
    draws: Draws | None,
) -> Decodes:
    """Of sequences with these rows of the page table. ahead: also what the next step may use."""
    limits = None
    furthest = int(ends.max())
    if ahead:
        limits = page_table.room(rows, page_size)
        furthest = max(furthest, min(int(limits.max()), furthest + 1 + num_drafts))
    columns = min(-(-furthest // page_size), page_table.max_pages)
    table = page_table.rows(rows, columns)
    return Decodes(sequences, numbers, num_drafts, ids, starts, ends, limits, table, draws)
