"""What one step runs: pieces of sequences, in the order in which they lie in it. `scheduler` decides."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from kvant.attention.need import LONG
from kvant.scheduling.request import Sequence, Status


class Chunk(NamedTuple):
    """Tokens `start` to `start + num_tokens` of one sequence, run in this step.

    max_drafts: draft tokens that its pages have room for behind them. drafts: those that are run
    with them, once a proposer was asked.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    max_drafts: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is followed by one that is not known yet."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows of logits that are wanted: behind its last token, and behind every draft."""
        return 1 + len(self.drafts) if self.samples else 0


# What a named tuple's own constructor calls, without the call around it: half of its time.
made_chunk = partial(tuple.__new__, Chunk)


def for_backends(chunk: Chunk) -> tuple[int, int]:
    """Backends want long stretches last, and those of one kind and size beside each other."""
    if chunk.num_tokens < LONG:
        return 0, 0
    return 2 - (chunk.start > 0), chunk.num_tokens


class Schedule(NamedTuple):
    """One step. chunks: oldest sequence first within decodes, then prefills, then the newly admitted;
    long stretches after all others, by length, those of new sequences last.

    pages_to_zero: cleared before anything is written. preempted: those that lost their pages for it.
    num_prefills: of the chunks, at their end; those before them are one token each that samples.
    has_everyone: nobody waits, or nobody for whom there will be room in the next step if nobody ends.
    """

    chunks: list[Chunk]
    pages_to_zero: list[int]
    preempted: list[Sequence]
    num_prefills: int
    has_everyone: bool = True

    def of_those_left(self, *, has_everyone: bool) -> Schedule:
        """Without those that have ended since; its pages are clear."""
        chunks = [c for c in self.chunks if c.sequence.status is Status.RUNNING]
        assert all(c.sequence.num_computed_tokens == c.start for c in chunks)
        first = len(self.chunks) - self.num_prefills
        num_prefills = sum(c.sequence.status is Status.RUNNING for c in self.chunks[first:])
        return Schedule(chunks, [], [], num_prefills, has_everyone)
