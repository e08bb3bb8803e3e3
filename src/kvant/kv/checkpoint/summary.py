"""The scale audit as a table: per layer and side, what was expected, found and used."""

from __future__ import annotations

from dataclasses import dataclass

from kvant.kv.checkpoint.facts import ScaleTensor, Side
from kvant.kv.dtype import KVDtype
from kvant.kv.format import CheckpointScales
from kvant.kv.spec import KVPlan, ScaleState


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One side of one layer.

    expected: the stored format takes a scale from a checkpoint. found: the tensor that is there,
    used or not. used: its value is applied, times `factor`. value: what applies where it is not,
    None where no scale applies at all. why: the state in words.
    """

    layer: int
    name: str
    side: Side
    dtype: KVDtype
    state: ScaleState
    expected: bool
    found: ScaleTensor | None
    used: bool
    factor: float
    value: float | None
    why: str


def summary(plan: KVPlan) -> tuple[ScaleRow, ...]:
    """A row for every side that is stored, in layer order, K before V."""
    rows = []
    for layer in plan.layers:
        for side, choice in ((Side.K, layer.k), (Side.V, layer.v)):
            if choice is None:
                continue
            scale, fmt = choice.scale, choice.dtype.format
            used = scale.state is ScaleState.FOUND
            rows.append(
                ScaleRow(
                    layer=layer.geometry.index,
                    name=layer.geometry.name,
                    side=side,
                    dtype=choice.dtype,
                    state=scale.state,
                    expected=fmt.checkpoint_scales is not CheckpointScales.NEVER,
                    found=scale.tensor,
                    used=used,
                    factor=scale.factor,
                    value=scale.fixed if fmt.takes_outside_scale and not used else None,
                    why=scale.because,
                )
            )
    return tuple(rows)
