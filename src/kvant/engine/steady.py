"""Steps that go on as they are: what another token changes, for all sequences at once.

While nobody arrives or ends, a step of plain answering sequences is known before it begins: the same
ones, each a token further. What the loop asks of every sequence in other steps lies in arrays here, so
such a step costs the host little more than handing on its tokens. As soon as anything else happens
(`Scheduler.changes`) steps go the usual way.

The sequences' tokens are kept as they always are. How many of them were computed is told to them when
such steps end (`Steady.settle`): until then it is all but the newest one.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import partial
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray

from kvant.engine.live import Live
from kvant.engine.result import Progress
from kvant.execution.decodes import list_draws, make_decodes
from kvant.execution.launched import Answered
from kvant.execution.runner import Runner
from kvant.execution.sampler import Rows
from kvant.execution.stepping import Ran
from kvant.scheduling.request import Status
from kvant.scheduling.schedule import Chunk
from kvant.scheduling.scheduler import Scheduler

# What a named tuple's own constructor calls, without the call around it.
one_token = partial(tuple.__new__, Progress)


class Steady:
    """lives: all that run, in their order; every one is simple and has one token to run. Whether there
    is text is the engine's to say, not theirs.
    """

    def __init__(self, lives: Items[Live], scheduler: Scheduler) -> None:
        self.sequences = [live.sequence for live in lives]
        self._scheduler = scheduler
        self._changes = scheduler.changes
        self._numbers = [live.number for live in lives]
        self._appends = [sequence.token_ids.append for sequence in self.sequences]
        self._texts = [live.text for live in lives if live.text is not None]  # of all, or of none
        self._newest = np.array([s.token_ids[-1] for s in self.sequences], np.int64)
        self._starts = np.array([s.num_computed_tokens for s in self.sequences], np.int64)
        self._rows = np.array([s.row for s in self.sequences], np.int64)
        self._room = self._find_room()
        self._most = np.array([s.request.max_total_tokens for s in self.sequences], np.int64)
        self._draws = list_draws(self.sequences)
        self._in_order = list(range(len(self.sequences)))
        self._no_logits = torch.empty(0)
        self._stop_tokens = frozenset().union(*(live.stop_tokens for live in lives))

    @property
    def goes_on(self) -> bool:
        """Whether the next step is another of these: nothing has happened, and no page is missing."""
        return self._changes == self._scheduler.changes and bool((self._starts < self._room).all())

    def run(self, runner: Runner) -> Answered:
        """The step, with pages for the one after it where there are any."""
        scheduler, page_size = self._scheduler, self._scheduler.limits.page_size
        ends = self._starts + 1
        growing = np.flatnonzero((ends == self._room) & (ends < self._most - 1)).tolist()
        if growing:
            scheduler.pages.grow_all_early([self.sequences[place] for place in growing])
            self._room = self._find_room()
        pages = scheduler.allocator.take_pages_to_zero()
        if pages:
            runner.zero(pages)
        self._no_logits = runner.run_decodes(
            make_decodes(
                self.sequences, self._numbers, self._newest, self._starts, ends, self._rows,
                scheduler.page_table, page_size, 0, ahead=True, draws=self._draws,
            )
        )  # fmt: skip
        return runner.read_decodes()

    def plain_tokens(self, found: Answered) -> list[int] | None:
        """Every sequence's token, if each of them is nothing but one more number."""
        sound, likeliest = found.known
        if found.first_rows == self._in_order:
            tokens = likeliest[: len(self._in_order)]
        else:
            tokens = [likeliest[row] for row in found.first_rows]
        ends_none = self._stop_tokens.isdisjoint(tokens) and (self._starts + 2 < self._most).all()
        return tokens if ends_none and all(sound) else None

    def take(self, tokens: list[int]) -> list[Progress]:
        """Append what `plain_tokens` found."""
        for append, token in zip(self._appends, tokens, strict=True):
            append(token)
        self._newest = np.array(tokens, np.int64)
        self._starts = self._starts + 1
        if self._draws is not None:
            self._draws = self._draws.after()
        texts: Iterable[str] = repeat("")
        if self._texts:
            texts = [text.push(token) for text, token in zip(self._texts, tokens, strict=True)]
        each = zip(
            self._numbers, zip(tokens), texts, repeat(None), repeat(()), repeat(None), strict=False
        )
        return list(map(one_token, each))

    def _find_room(self) -> NDArray[np.int64]:
        """Tokens that each can store: nobody else gives these sequences pages, or takes them away."""
        return self._scheduler.page_table.room(self._rows, self._scheduler.limits.page_size)

    def settle(self) -> None:
        """Tell the sequences that still run how far they are; there is no step after this."""
        for sequence, known in zip(self.sequences, self._starts.tolist(), strict=True):
            if sequence.status is Status.RUNNING:
                sequence.num_computed_tokens = known

    def ran(self, found: Answered) -> Ran:
        """The step as any other. Its logits are gone: nobody here asks for more than is known."""
        rows = Rows(self._no_logits, [], found.known, is_final=True)
        starts = self._starts.tolist()
        chunks = [Chunk(s, start, 1) for s, start in zip(self.sequences, starts, strict=True)]
        return Ran(chunks, rows, found.first_rows, [])
