"""The search for each layer's formats and wide rows that cost least under a budget. Pure, without torch.

It assumes that costs of layers and sides add up; KL divergences of small independent errors do so
approximately. Then choosing one way to store each layer is a multiple-choice knapsack problem, which dynamic
programming over bytes solves exactly. The error of this assumption is measured afterwards, on held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.request import AskedWide

Place = tuple[int, Side]
"""A layer's index, and a side."""

_FINEST = 1 << 17
"""Maximum number of steps that a budget is divided into. Finer sizes are rounded up to a step."""


class Costed(Protocol):
    """What can be chosen. bytes: whole bytes. kl: what it adds alone, in nats."""

    @property
    def bytes(self) -> int: ...

    @property
    def kl(self) -> float: ...


Key = TypeVar("Key")
Choice = TypeVar("Choice", bound=Costed)


@dataclass(frozen=True, slots=True)
class Option:
    """One format for one place. bytes: of all tokens and KV heads. kl: that it adds alone, in nats."""

    dtype: KVDtype
    bytes: int
    kl: float


@dataclass(frozen=True, slots=True)
class LayerOption:
    """One way to store a layer: formats of both sides, and which rows it stores wide too; None for none.

    wide_bytes: of these rows, in all.
    """

    sides: Mapping[Side, Option]
    rows: AskedWide | None = None
    wide_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.wide_bytes + sum(option.bytes for option in self.sides.values())

    @property
    def kl(self) -> float:
        return sum(option.kl for option in self.sides.values())


@dataclass(frozen=True, slots=True)
class Assignment(Generic[Key, Choice]):
    """A choice for every key. kl: the sum over them."""

    chosen: Mapping[Key, Choice]

    @property
    def bytes(self) -> int:
        return sum(option.bytes for option in self.chosen.values())

    @property
    def kl(self) -> float:
        return sum(option.kl for option in self.chosen.values())


def fewest_bytes(options: Mapping[Key, Sequence[Choice]]) -> Assignment[Key, Choice]:
    """Returns the smallest choice for each key; among equally small ones, the one with less KL."""
    return Assignment({p: min(os, key=lambda o: (o.bytes, o.kl)) for p, os in options.items()})


def least_kl(options: Mapping[Key, Sequence[Choice]]) -> Assignment[Key, Choice]:
    """Returns the choice of least KL for each key; among equal ones, the smallest."""
    return Assignment({p: min(os, key=lambda o: (o.kl, o.bytes)) for p, os in options.items()})


def best_within(
    options: Mapping[Key, Sequence[Choice]], budget: int
) -> Assignment[Key, Choice] | None:
    """Returns the assignment of least KL with at most `budget` bytes; None if the smallest has more.

    It is exact up to `_FINEST` steps of a budget: the smallest assignment is returned if no other is found.
    """
    places = list(options)
    smallest = fewest_bytes(options)
    if smallest.bytes > budget:
        return None
    unit = math.gcd(*(o.bytes for found in options.values() for o in found))
    unit *= max(1, -(-budget // (unit * _FINEST)))
    room = budget // unit
    cost = np.full(room + 1, np.inf)
    cost[0] = 0.0
    taken: list[np.ndarray[tuple[int], np.dtype[np.int16]]] = []
    for place in places:
        best = np.full(room + 1, np.inf)
        which = np.full(room + 1, -1, np.int16)
        for number, option in enumerate(options[place]):
            size = -(-option.bytes // unit)
            if size > room:
                continue
            moved = np.full(room + 1, np.inf)
            moved[size:] = cost[: room + 1 - size] + option.kl
            better = moved < best
            best[better], which[better] = moved[better], number
        cost = best
        taken.append(which)
    at = int(np.argmin(cost))
    if not np.isfinite(cost[at]):
        return smallest  # it fits, but not after its sizes are rounded up
    chosen: dict[Key, Choice] = {}
    for place, which in zip(reversed(places), reversed(taken), strict=True):
        option = options[place][int(which[at])]
        chosen[place] = option
        at -= -(-option.bytes // unit)
    return Assignment({place: chosen[place] for place in places})


def best_without_one(
    options: Mapping[int, Sequence[LayerOption]],
    found: Assignment[int, LayerOption],
    budget: int,
) -> dict[tuple[Side, KVDtype], Assignment[int, LayerOption]]:
    """Returns the best assignments that avoid one format of `found` each, by its side and name.

    options: all of them, since the avoided format may be what beats another one. The model dtype, which costs
    nothing, is never avoided. Neither is a format that the budget needs.
    """
    used = {
        (side, option.dtype): None
        for one in found.chosen.values()
        for side, option in one.sides.items()
        if option.kl > 0
    }
    others: dict[tuple[Side, KVDtype], Assignment[int, LayerOption]] = {}
    for side, dtype in used:
        left = {
            index: not_beaten(way for way in ways if way.sides[side].dtype is not dtype)
            for index, ways in options.items()
        }
        other = best_within(left, budget) if all(left.values()) else None
        if other is not None:
            others[side, dtype] = other
    return others


def smallest_under(
    options: Mapping[Key, Sequence[Choice]], most_kl: float
) -> Assignment[Key, Choice] | None:
    """Returns the assignment of fewest bytes whose KL is at most `most_kl`; None if the best has more."""
    found = least_kl(options)
    if found.kl > most_kl:
        return None
    low, high = fewest_bytes(options).bytes, found.bytes
    while low < high:
        middle = (low + high) // 2
        tried = best_within(options, middle)
        if tried is not None and tried.kl <= most_kl:
            found, high = tried, min(middle, tried.bytes)
        else:
            low = middle + 1
    return found


def not_beaten(options: Iterable[Choice]) -> list[Choice]:
    """Returns options for which no other has at most the bytes and at most the KL, sorted by bytes."""
    best, found = math.inf, []
    for option in sorted(options, key=lambda o: (o.bytes, o.kl)):
        if option.kl < best:
            best = option.kl
            found.append(option)
    return found
