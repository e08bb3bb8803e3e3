"""The shape of a model and where it comes from. No torch; `kvant.models.read_shape` finds it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvant.kv.geometry import ModelGeometry
from kvant.models.geometry.renaming import NameRules


class ShapeSource(Enum):
    """The source of a model's shape, in the words of `kvant plan`."""

    CONFIG = "config.json"
    PROBED = "probed from transformers' own forward"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's shape. num_weights: elements of all weights. parameters: names and shapes, from a probe.

    stored: names and shapes of all tensors in files as transformers writes them, if they are others.
    linear, embeddings: paths of a probed model's modules of torch's classes. names: the class's rules for
    names in files; None if they are unknown.
    """

    geometry: ModelGeometry
    source: ShapeSource
    num_weights: int | None = None
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    stored: tuple[tuple[str, tuple[int, ...]], ...] = ()
    linear: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    names: NameRules | None = None
