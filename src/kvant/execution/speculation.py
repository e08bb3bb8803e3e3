"""The engine's half of speculation: who is asked for drafts, what they came to, whether it pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvant.errors import EngineFault
from kvant.scheduling.schedule import Chunk
from kvant.speculative.adaptive import Adaptive
from kvant.speculative.base import Ask, Proposer
from kvant.speculative.counts import Counts, SpeculationStats

Ways = Callable[[int], Sequence[int]]
"""Of a number of answering sequences: numbers of drafts whose steps are recorded, 0 among them."""


class Speculation:
    """One proposer in one engine.

    num_speculative_tokens: drafts of one sequence in one step at most. adaptive: draft fewer, or
    none, where that is faster. ways: what can be chosen from; all or nothing without.
    """

    def __init__(
        self,
        proposer: Proposer,
        num_speculative_tokens: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        ways: Ways | None = None,
    ) -> None:
        self._proposer = proposer
        self._most = num_speculative_tokens
        self._vocab_size = vocab_size
        self._adaptive = Adaptive() if adaptive else None
        self._ways = ways or (lambda num_running: (0, num_speculative_tokens))
        self._counts = Counts(num_speculative_tokens)
        self._started = 0.0
        self._num_running = 1
        self._chosen = num_speculative_tokens

    @property
    def stats(self) -> SpeculationStats:
        return self._counts.stats(pays=self._chosen > 0)

    def num_draft_tokens(self, num_running: int) -> int:
        """How many drafts each answering sequence may have in the next step, which begins now."""
        self._started = time.perf_counter()
        self._num_running = max(1, num_running)
        if self._adaptive is not None:
            ways = self._ways(self._num_running)
            self._chosen = self._adaptive.choose(self._num_running, ways)
        return self._chosen

    def goes_on(self) -> bool:
        """Whether the step after this one is to have as many drafts, if nobody ends or arrives."""
        return self._adaptive is None or self._adaptive.goes_on(self._num_running)

    def zero(self, pages: Sequence[int]) -> None:
        self._proposer.zero(pages)

    def propose(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks with their drafts, as many as the scheduler left room for."""
        asking = [place for place, chunk in enumerate(chunks) if chunk.max_drafts]
        if not asking:
            return chunks
        chunks = list(chunks)
        drafts = self._proposer.propose([_ask(chunks[place]) for place in asking])
        for place, found in zip(asking, drafts, strict=True):
            self._check(found, chunks[place].max_drafts)
            chunks[place] = chunks[place]._replace(drafts=tuple(found))
        return chunks

    def note(self, chunks: Sequence[Chunk], emitted: Sequence[Sequence[int]]) -> None:
        """Every step ends here. emitted: the tokens that each chunk's sequence got."""
        drafted = False
        for chunk, tokens in zip(chunks, emitted, strict=True):
            if chunk.drafts and tokens:
                drafted = True
                same = zip(tokens, chunk.drafts, strict=False)
                accepted = sum(token == draft for token, draft in same)
                self._counts.note(len(chunk.drafts), accepted, len(tokens))
        if not all(c.num_tokens == 1 and tokens for c, tokens in zip(chunks, emitted, strict=True)):
            return  # with pieces of prompts in it the step says nothing about any way
        if not drafted:
            self._counts.num_plain_steps += 1
        if self._adaptive is not None:
            seconds = time.perf_counter() - self._started
            num_drafts = self._chosen if drafted else 0
            self._adaptive.note([len(tokens) for tokens in emitted], seconds, num_drafts=num_drafts)

    def _check(self, drafts: Sequence[int], room: int) -> None:
        """Whatever a proposer does, nothing that is no token gets into the model."""
        if len(drafts) > room or not all(0 <= token < self._vocab_size for token in drafts):
            raise EngineFault(
                f"the proposer {type(self._proposer).__name__} drafted {list(drafts)}: "
                f"{room} ids from 0 to {self._vocab_size - 1} at most were asked for"
            )


def _ask(chunk: Chunk) -> Ask:
    sequence = chunk.sequence
    return Ask(sequence.token_ids, sequence.pages, chunk.max_drafts)
