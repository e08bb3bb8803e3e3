"""Identity of pages outside of their process: everything that decides what their bytes mean.

Two engines may exchange pages if every field is equal. Paths and names of models are no part of it: weights
are known by their contents, so a copy of a model, or the next version of Kvant, finds its pages again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEME = 1
"""Number of the way in which pages are laid out in files and hashes are made; changes with either."""


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """Fields in the order in which they are compared; all are text.

    weights: digest of the contents of the model's files. weight_format: how weights are rounded while they
    are loaded. formats: of every layer (`KVPlan.fingerprint`). scales: digest of the values outside of pages.
    rotary: what decides the frequencies. layout: bytes of a page of each group and where layers lie in it.
    draft: of a drafter whose pages lie beside the target's. arithmetic: what decides the last bit of a
    value; empty unless the engine promises equal bits.
    """

    weights: str
    weight_format: str
    formats: str
    scales: str
    rotary: str
    layout: str
    draft: str
    arithmetic: str
    byte_order: str = sys.byteorder
    scheme: str = field(default=str(SCHEME))

    @property
    def fields(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def digest(self) -> bytes:
        """32 bytes."""
        return hashlib.sha256(json.dumps(self.fields).encode()).digest()

    def difference(
        self, other: Mapping[str, Any], among: Collection[str] | None = None
    ) -> str | None:
        """Returns the first field that differs from another identity's, with both values; None if equal.

        among: fields that are compared; all without.
        """
        for name, value in self.fields.items():
            if among is not None and name not in among:
                continue
            theirs = other.get(name)
            if theirs != value:
                return f"{name} is {_short(theirs)}, here it is {_short(value)}"
        return None


def digest_of(facts: object) -> str:
    """Returns a short digest of plain data."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _short(value: object) -> str:
    text = "missing" if value is None else str(value) or "empty"
    return text if len(text) <= 48 else f"{text[:45]}..."
