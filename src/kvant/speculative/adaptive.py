"""When speculation pays: both ways of stepping are timed, and the faster one goes on.

A step with drafts takes longer and gives more tokens. Which way is faster depends on the device, the
number of sequences (a large batch already fills the device) and on how well drafts are accepted just
now, so nothing is assumed: tokens and seconds of both ways are summed up, older steps counting less,
for each order of magnitude of the batch. The slower way is tried again now and then, because texts
change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_DECAY = 0.96
"""Of both sums with every step: the last 25 or so count, and what was long ago hardly does."""

_TRIALS = 4
"""Steps of each way before they are compared."""

_RETRY_EVERY = 64
"""Steps after which the slower way gets two steps again: at most 3 % of the time."""

_RETRY_STEPS = 2


@dataclass(slots=True)
class _Way:
    """Tokens and seconds of steps of one way."""

    tokens: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.num_steps += 1

    def fade(self) -> None:
        self.tokens *= _DECAY
        self.seconds *= _DECAY

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Size:
    """Both ways for one size of batch. since_retry: steps since the slower one was tried."""

    drafting: _Way = field(default_factory=_Way)
    plain: _Way = field(default_factory=_Way)
    since_retry: int = 0


class Adaptive:
    """Chooses between drafting and plain steps from what both gave. Batches count by powers of two."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def drafts(self, num_sequences: int) -> bool:
        """Whether the next step of so many answering sequences is to have drafts."""
        size = self._sizes.get(num_sequences.bit_length())
        if size is None or size.drafting.num_steps < _TRIALS:
            return True
        if size.plain.num_steps < _TRIALS:
            return False
        return self._faster_drafts(size) != (size.since_retry >= _RETRY_EVERY)

    def note(self, num_sequences: int, tokens: int, seconds: float, *, drafted: bool) -> None:
        """A step of nothing but answering sequences was run."""
        size = self._sizes.setdefault(num_sequences.bit_length(), _Size())
        size.drafting.fade()
        size.plain.fade()
        (size.drafting if drafted else size.plain).add(tokens, seconds)
        size.since_retry += 1
        if size.since_retry >= _RETRY_EVERY + _RETRY_STEPS:
            size.since_retry = 0

    @staticmethod
    def _faster_drafts(size: _Size) -> bool:
        return size.drafting.speed >= size.plain.speed
