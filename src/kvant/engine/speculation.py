"""The engine's half of speculation: who is asked for drafts, what they came to, whether it pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvant.engine.batch import Batch
from kvant.engine.scheduler import Chunk
from kvant.errors import EngineFault
from kvant.speculative.adaptive import Adaptive
from kvant.speculative.base import Ask, Proposer, Verified
from kvant.speculative.counts import Counts, SpeculationStats


class Speculation:
    """One proposer in one engine.

    num_speculative_tokens: drafts of one sequence in one step at most. adaptive: step aside where
    plain steps are faster. clock: seconds, for tests.
    """

    def __init__(
        self,
        proposer: Proposer,
        num_speculative_tokens: int,
        vocab_size: int,
        *,
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._proposer = proposer
        self._most = num_speculative_tokens
        self._vocab_size = vocab_size
        self._adaptive = Adaptive() if adaptive else None
        self._clock = clock
        self._counts = Counts(num_speculative_tokens)
        self._started = 0.0
        self._num_running = 1

    @property
    def taps(self) -> tuple[int, ...]:
        """Decoder layers whose outputs the proposer reads."""
        return self._proposer.taps

    @property
    def stats(self) -> SpeculationStats:
        return self._counts.stats(pays=self._pays(self._num_running))

    def num_draft_tokens(self, num_running: int) -> int:
        """How many drafts each answering sequence may have in the next step, which begins now."""
        self._started = self._clock()
        self._num_running = max(1, num_running)
        return self._most if self._pays(self._num_running) else 0

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

    def learn(
        self,
        chunks: Sequence[Chunk],
        batch: Batch,
        hidden: tuple[Tensor, ...],
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """Every step ends here. emitted: the tokens that each chunk's sequence got."""
        self._proposer.learn(Verified(batch.step, hidden, _kept(chunks, emitted, batch)))
        drafted = False
        for chunk, tokens in zip(chunks, emitted, strict=True):
            if chunk.drafts and tokens:
                drafted = True
                same = zip(tokens, chunk.drafts, strict=False)
                accepted = sum(token == draft for token, draft in same)
                self._counts.note(len(chunk.drafts), accepted, len(tokens))
        if not all(c.num_tokens == 1 and tokens for c, tokens in zip(chunks, emitted, strict=True)):
            return  # with pieces of prompts in it the step says nothing about either way
        if not drafted:
            self._counts.num_plain_steps += 1
        if self._adaptive is not None:
            seconds = self._clock() - self._started
            num_tokens = sum(len(tokens) for tokens in emitted)
            self._adaptive.note(len(chunks), num_tokens, seconds, drafted=drafted)

    def _check(self, drafts: Sequence[int], room: int) -> None:
        """Whatever a proposer does, nothing that is no token gets into the model."""
        if len(drafts) > room or not all(0 <= token < self._vocab_size for token in drafts):
            raise EngineFault(
                f"the proposer {type(self._proposer).__name__} drafted {list(drafts)}: "
                f"{room} ids from 0 to {self._vocab_size - 1} at most were asked for"
            )

    def _pays(self, num_running: int) -> bool:
        return self._adaptive is None or self._adaptive.drafts(num_running)


def _ask(chunk: Chunk) -> Ask:
    sequence = chunk.sequence
    return Ask(sequence.token_ids, sequence.pages, chunk.max_drafts)


def _kept(chunks: Sequence[Chunk], emitted: Sequence[Sequence[int]], batch: Batch) -> Tensor | None:
    """Rows of the step whose tokens stand: all but those of rejected drafts."""
    rows: list[int] = []
    start = 0
    for chunk, tokens in zip(chunks, emitted, strict=True):
        # The last token that a sequence got has not been run: it is the next step's.
        stand = chunk.num_tokens + (max(0, len(tokens) - 1) if chunk.drafts else 0)
        rows += range(start, start + stand)
        start += chunk.num_tokens + len(chunk.drafts)
    if len(rows) == start:
        return None
    return torch.tensor(rows, device=batch.input_ids.device)
