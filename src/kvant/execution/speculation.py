"""The engine's side of speculative decoding: chooses the number of drafts, asks proposers that run on the
host, and counts accepted drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvant.errors import EngineFault
from kvant.execution.batch import Drafts
from kvant.scheduling.scheduler import Schedule
from kvant.speculative.adaptive import Adaptive
from kvant.speculative.base import Ask, Proposer
from kvant.speculative.counts import Counts, SpeculationStats

Ways = Callable[[int], Sequence[int]]
"""Maps a number of decoding sequences to the numbers of drafts, including 0, whose steps are recorded."""

Propose = Callable[[Sequence[Ask]], list[list[int]]]
"""The type of `Proposer.propose`."""


class Speculation:
    """Drives one proposer in one engine.

    num_speculative_tokens: the most drafts of one sequence in one step. adaptive: draft fewer, or none, if
    that is faster. ways: the numbers of drafts to choose from; None allows all drafts or none. propose: asks
    the proposer, on every rank that has one.
    """

    def __init__(
        self,
        proposer: Proposer,
        num_speculative_tokens: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        ways: Ways | None = None,
        propose: Propose | None = None,
    ) -> None:
        self._proposer = proposer
        self._ask = propose or (lambda asks: proposer.propose(asks))
        self._most = num_speculative_tokens
        self._vocab_size = vocab_size
        self._adaptive = Adaptive() if adaptive else None
        self._ways = ways or (lambda num_running: (0, num_speculative_tokens))
        self._counts = Counts(num_speculative_tokens)
        self._num_running = 1
        self._chosen = num_speculative_tokens
        self._committed_at = 0.0

    @property
    def num_speculative_tokens(self) -> int:
        """The most drafts of one sequence in one step."""
        return self._most

    @property
    def stats(self) -> SpeculationStats:
        return self._counts.stats(pays=self._chosen > 0)

    def num_draft_tokens(self, num_running: int) -> int:
        """Returns how many drafts each decoding sequence may have in the next step."""
        self._num_running = max(1, num_running)
        if self._adaptive is not None:
            ways = self._ways(self._num_running)
            self._chosen = self._adaptive.choose(self._num_running, ways)
        return self._chosen

    def zero(self, pages: Sequence[int]) -> None:
        self._proposer.zero(pages)

    def propose(self, schedule: Schedule) -> Drafts | None:
        """Returns the drafts of each sequence, at most `schedule.max_drafts`; None if there are none.

        The host must know every token of the schedule's sequences.
        """
        if schedule.max_drafts is None:
            return None
        drafts: list[tuple[int, ...]] = [()] * len(schedule.sequences)
        asking = schedule.max_drafts.nonzero()[0].tolist()
        rooms = schedule.max_drafts.tolist()
        sequences = schedule.sequences
        asks = [Ask(sequences[i].token_ids, sequences[i].held, rooms[i]) for i in asking]
        for place, found in zip(asking, self._ask(asks), strict=True):
            self._check(found, rooms[place])
            drafts[place] = tuple(found)
        return drafts if any(drafts) else None

    def note(
        self, schedule: Schedule, drafts: Drafts | None, emitted: Sequence[Sequence[int]],
        launched_at: float,
    ) -> None:  # fmt: skip
        """Counts a committed step and its time. emitted: the tokens that each sequence got.

        launched_at: `time.perf_counter` at its launch. A step that was launched before the previous one was
        committed is timed from that commit.
        """
        now = time.perf_counter()
        seconds = now - max(launched_at, self._committed_at)
        self._committed_at = now
        for draft, tokens in zip(drafts or (), emitted, strict=False):
            if draft and tokens:
                accepted = sum(t == d for t, d in zip(tokens, draft, strict=False))
                self._counts.note(len(draft), accepted, len(tokens))
        if schedule.num_prefills or not all(emitted):
            return  # the time of a step with pieces of prompts says nothing about drafts
        drafted = drafts is not None and any(drafts)
        if not drafted:
            self._counts.num_plain_steps += 1
        if self._adaptive is not None:
            num_drafts = schedule.num_drafts if drafted else 0
            self._adaptive.note([len(t) for t in emitted], seconds, num_drafts=num_drafts)

    def _check(self, drafts: Sequence[int], room: int) -> None:
        """Raises EngineFault if a proposer returns too many drafts, or ids outside the vocabulary."""
        if len(drafts) > room or not all(0 <= token < self._vocab_size for token in drafts):
            raise EngineFault(
                f"the proposer {type(self._proposer).__name__} drafted {list(drafts)}: "
                f"{room} ids from 0 to {self._vocab_size - 1} at most were asked for"
            )
