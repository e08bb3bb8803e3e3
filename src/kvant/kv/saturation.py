"""Saturated values: numbers beyond a format's range, which are stored as its largest number.

Saturation raises no error and rarely shows in answers at first, so it is counted for every layer.
`KVFormat.largest` says where a format's range ends; `kvant.kv.saturation_counter` counts.
No torch here: reports import this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.spec import Choice, LayerSpec, Role


def largest_stored(choice: Choice | None, compute: ComputeDtype) -> float | None:
    """Returns the largest magnitude that one side of a layer can store, in units of its outside scale.

    None where the side stores nothing, or where no number computed in `compute` can be too large.
    """
    if choice is None:
        return None
    if choice.dtype is KVDtype.FLOAT16 and compute is ComputeDtype.FLOAT16:
        return None
    return choice.dtype.format.largest


@dataclass(frozen=True, slots=True)
class Saturated:
    """How many values of a layer's keys (k) and values (v) were saturated.

    role: whose layer it is; the target and the draft model number their layers from 0 each.
    """

    role: Role
    spec: LayerSpec
    k: int
    v: int

    @property
    def layer(self) -> str:
        """For reports: "3", or "draft:0" of a drafter, as in rules for layers."""
        index = str(self.spec.geometry.index)
        return index if self.role is Role.TARGET else f"{self.role.value}:{index}"
