"""Contestants that take turns on one case."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.engine_timing import Case, time_engine
from kvant.engine.engine import Engine
from kvant.kv.dtype import KVDtype


@dataclass(frozen=True, slots=True)
class Contestant:
    """A contestant. time: maps a case and a number of repeats to milliseconds of each decode step or whole
    prompt, and the share of them outside compiled code, if known.
    """

    engine: str
    weights: str
    kv: str
    time: Callable[[Case, int], tuple[Sequence[float], float | None]]


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant on one case. rounds: milliseconds of each step or prompt, by round.

    tokens: new tokens of each step or prompt. python_share: of the last round's time, spent outside
    compiled code, if known.
    """

    case: str
    engine: str
    weights: str
    kv: str
    tokens: int
    rounds: tuple[tuple[float, ...], ...]
    python_share: float | None = None
    part: str = ""

    @property
    def median_ms(self) -> float:
        return statistics.median(ms for found in self.rounds for ms in found)

    @property
    def best_ms(self) -> float:
        """Milliseconds of the fastest repeat, which other load on the machine affects least."""
        return min(ms for found in self.rounds for ms in found)

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tokens / self.median_ms


def kvant(engine: Engine, weights: str, stored: KVDtype) -> Contestant:
    """Kvant's own engine, in this process."""

    def time(case: Case, repeats: int) -> tuple[Sequence[float], float | None]:
        (timing,) = time_engine(engine, [case], repeats=repeats)
        return timing.milliseconds, timing.python_share

    return Contestant("Kvant", weights, str(stored), time)


def take_turns(
    contestants: Sequence[Contestant], case: Case, *, repeats: int, rounds: int
) -> list[Row]:
    """Returns one row per contestant; their order is reversed from round to round."""
    found: list[list[tuple[float, ...]]] = [[] for _ in contestants]
    shares: list[float | None] = [None] * len(contestants)
    for number in range(rounds):
        order = list(range(len(contestants)))
        for index in order if number % 2 else reversed(order):
            milliseconds, shares[index] = contestants[index].time(case, repeats)
            found[index].append(tuple(milliseconds))
    tokens = case.batch if case.decode else case.batch * case.context
    return [
        Row(str(case), c.engine, c.weights, c.kv, tokens, tuple(rounds_of), share)
        for c, rounds_of, share in zip(contestants, found, shares, strict=True)
    ]
