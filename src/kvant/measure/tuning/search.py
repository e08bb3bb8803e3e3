"""The search for the format of each layer and side that costs least under a budget. Pure, without torch.

It assumes that costs of sides add up; KL divergences of small independent errors do so approximately. Then
choosing one format per side is a multiple-choice knapsack problem, which dynamic programming over bytes
solves exactly. The error of this assumption is measured afterwards, on held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side

Place = tuple[int, Side]
"""A layer's index, and a side."""


@dataclass(frozen=True, slots=True)
class Option:
    """One format for one place. bytes: per token, all KV heads. kl: that it adds alone, in nats."""

    dtype: KVDtype
    bytes: int
    kl: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """A format for every place. kl: the sum over its options."""

    chosen: Mapping[Place, Option]

    @property
    def bytes(self) -> int:
        return sum(option.bytes for option in self.chosen.values())

    @property
    def kl(self) -> float:
        return sum(option.kl for option in self.chosen.values())


def fewest_bytes(options: Mapping[Place, Sequence[Option]]) -> Assignment:
    """Returns each place in its narrowest format; among equally narrow ones, the one with less KL."""
    return Assignment({p: min(os, key=lambda o: (o.bytes, o.kl)) for p, os in options.items()})


def least_kl(options: Mapping[Place, Sequence[Option]]) -> Assignment:
    """Returns each place in its format of least KL; among equal ones, the narrowest."""
    return Assignment({p: min(os, key=lambda o: (o.kl, o.bytes)) for p, os in options.items()})


def best_within(options: Mapping[Place, Sequence[Option]], budget: int) -> Assignment | None:
    """Returns the assignment of least KL with at most `budget` bytes; None if the narrowest has more."""
    places = list(options)
    unit = math.gcd(*(o.bytes for found in options.values() for o in found))
    room = budget // unit
    if fewest_bytes(options).bytes > budget:
        return None
    cost = np.full(room + 1, np.inf)
    cost[0] = 0.0
    taken: list[np.ndarray[tuple[int], np.dtype[np.int16]]] = []
    for place in places:
        best = np.full(room + 1, np.inf)
        which = np.full(room + 1, -1, np.int16)
        for number, option in enumerate(options[place]):
            size = option.bytes // unit
            if size > room:
                continue
            moved = np.full(room + 1, np.inf)
            moved[size:] = cost[: room + 1 - size] + option.kl
            better = moved < best
            best[better], which[better] = moved[better], number
        cost = best
        taken.append(which)
    at = int(np.argmin(cost))
    chosen: dict[Place, Option] = {}
    for place, which in zip(reversed(places), reversed(taken), strict=True):
        option = options[place][int(which[at])]
        chosen[place] = option
        at -= option.bytes // unit
    return Assignment({place: chosen[place] for place in places})


def smallest_under(options: Mapping[Place, Sequence[Option]], most_kl: float) -> Assignment | None:
    """Returns the assignment of fewest bytes whose KL is at most `most_kl`; None if the best has more."""
    if least_kl(options).kl > most_kl:
        return None
    low, high = fewest_bytes(options).bytes, least_kl(options).bytes
    found = best_within(options, high)
    assert found is not None
    while low < high:
        middle = (low + high) // 2
        tried = best_within(options, middle)
        if tried is not None and tried.kl <= most_kl:
            found, high = tried, min(middle, tried.bytes)
        else:
            low = middle + 1
    return found


def not_beaten(options: Sequence[Option]) -> list[Option]:
    """Returns options for which no other has at most the bytes and at most the KL, sorted by bytes."""
    best, found = math.inf, []
    for option in sorted(options, key=lambda o: (o.bytes, o.kl)):
        if option.kl < best:
            best = option.kl
            found.append(option)
    return found
