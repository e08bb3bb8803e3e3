"""The shape of a model and where it comes from. No torch; `kvant.models.read_shape` finds it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvant.kv.geometry import ModelGeometry


class ShapeSource(Enum):
    """Where a model's shape comes from, in the words of `kvant plan`."""

    CONFIG = "config.json"
    PROBED = "probed from transformers' own forward"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """num_weights: elements of all weights. parameters: names and shapes of those; where a probe saw them."""

    geometry: ModelGeometry
    source: ShapeSource
    num_weights: int | None = None
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
