"""Values that a format cannot hold: what they are, and what a layer says of them.

A number beyond what a format reaches with its scale is stored as the format's largest. That is rarely
seen in answers at first, and never in an error: so it is counted. Formats that make a scale of their
own for every row reach whatever the row holds, and have nothing to count (turboquant's float16 scales
end where float16 does, which no model that runs in 16 bits reaches).

Without torch: reports carry these. `kvant.kv.saturation_counter` counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.spec import Choice, LayerSpec, Role

_NVFP4_LARGEST = 6.0 * 448.0
"""The largest e2m1 number times the largest block scale."""

LARGEST: dict[KVDtype, float] = {
    KVDtype.FLOAT16: 65504.0,
    KVDtype.FP8_E4M3: 448.0,
    KVDtype.FP8_E4M3FNUZ: 240.0,
    KVDtype.FP8_E5M2: 57344.0,
    KVDtype.TURBOQUANT_K8: 448.0,
    KVDtype.NVFP4: _NVFP4_LARGEST,
}
"""The largest magnitude, in units of the scale from outside the pages, of formats that end there."""


def largest_stored(choice: Choice | None, compute: ComputeDtype) -> float | None:
    """What one side of a layer can hold, over its outside scale; None where nothing can be beyond."""
    if choice is None:
        return None
    if choice.dtype is KVDtype.FLOAT16 and compute is ComputeDtype.FLOAT16:
        return None
    return LARGEST.get(choice.dtype)


@dataclass(frozen=True, slots=True)
class Saturated:
    """How many values of a layer's keys and values were beyond what its formats hold.

    role: whose layer it is, as target and draft count theirs from 0 each.
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
