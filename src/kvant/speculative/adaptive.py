"""Chooses how many drafts a step has, by measured speed.

A step with drafts takes longer and gives more tokens. The best number of drafts depends on the device, on
the batch size and on the current acceptance rate. So for each power of two of the batch size this module
measures how long steps with each number take, and which share of the drafts is accepted at each position.
Older steps count less. A slower number is tried again now and then, because texts change.

A chosen number, a "way", is kept for a stretch of steps. The first step of a stretch is not timed, since it
may wait for a step with another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_MEMORY = 0.97
"""Decay of all sums per added step, so that about the last 30 steps count."""

_TRIAL = 4
"""Steps to run with each number of drafts before the numbers are compared."""

_STRETCH = 30
"""Steps to run with the fastest number before the next choice."""

_STRETCHES = 4
"""Stretches of the fastest number before another one is tried for _RETRY steps."""

_RETRY = 3


@dataclass(slots=True)
class _Share:
    """A decaying ratio of two sums, in which older entries count less."""

    yes: float = 0.0
    all: float = 0.0

    def add(self, yes: float, all_: float) -> None:
        self.yes = self.yes * _MEMORY + yes
        self.all = self.all * _MEMORY + all_

    @property
    def value(self) -> float:
        return self.yes / self.all if self.all else 0.0


@dataclass(slots=True)
class _Way:
    """Measurements of steps with one number of drafts. pace: sequences per second."""

    pace: _Share = field(default_factory=_Share)
    num_steps: int = 0


@dataclass(slots=True)
class _Size:
    """Measurements for one size of batch. ways: by number of drafts.

    stood: by position, the share of drafts accepted there, over all steps with a draft there. current: the
    number of drafts now, for `left` more steps. fresh: no step of this stretch has run yet. stretches: of
    the fastest number since another one was tried. retried: the number that was tried again last.
    """

    ways: dict[int, _Way] = field(default_factory=dict)
    stood: dict[int, _Share] = field(default_factory=dict)
    current: int = 0
    left: int = 0
    fresh: bool = True
    stretches: int = 0
    retried: int = 0

    def speed(self, num_drafts: int) -> float:
        """Returns the tokens per second with a number of drafts that has been tried."""
        tokens = 1.0
        for place in range(1, num_drafts + 1):
            tokens += self.stood[place].value
        return tokens * self.ways[num_drafts].pace.value


class Adaptive:
    """Chooses the number of drafts by measured speed, separately for each power of two of the batch size."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_sequences: int, ways: Sequence[int]) -> int:
        """Returns how many drafts each decoding sequence has in the next step, and counts that step.

        ways: the allowed numbers, including 0; the largest is tried first.
        """
        size = self._sizes.setdefault(num_sequences.bit_length(), _Size())
        if not size.left or size.current not in ways:
            self._begin(size, ways)
        size.left -= 1
        return size.current

    def note(self, new: Sequence[int], seconds: float, *, num_drafts: int) -> None:
        """Records a step that ran decodes only. num_drafts: a number that `choose` was offered.

        new: how many tokens each sequence got. seconds: the step's duration.
        """
        size = self._sizes.setdefault(len(new).bit_length(), _Size())
        for place in range(1, num_drafts + 1):
            stood = sum(count > place for count in new)
            size.stood.setdefault(place, _Share()).add(stood, len(new))
        if num_drafts != size.current or not size.fresh:
            way = size.ways.setdefault(num_drafts, _Way())
            way.pace.add(len(new), seconds)
            way.num_steps += 1
        if num_drafts == size.current:
            size.fresh = False

    @staticmethod
    def _begin(size: _Size, ways: Sequence[int]) -> None:
        """Chooses the number of drafts of the next stretch, and its length."""
        before = size.current
        for way in sorted(ways, reverse=True):
            tried = size.ways.get(way)
            # The first step does not count, and the last one may not have been read yet.
            if tried is None or tried.num_steps < _TRIAL - 2:
                size.current, size.left = way, _TRIAL
                break
        else:
            best = max(ways, key=size.speed)
            others = sorted(way for way in ways if way != best)
            if others and size.stretches >= _STRETCHES:
                later = [way for way in others if way > size.retried]
                size.retried = size.current = (later or others)[0]
                size.stretches, size.left = 0, _RETRY
            else:
                size.current, size.left = best, _STRETCH
                size.stretches += 1
        size.fresh = size.current != before
