"""Facts about the models' files and the device's memory that a plan is made from. `read_facts` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvant.errors import ConfigError
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.models.local import LocalModel
from kvant.models.shape import ModelShape
from kvant.models.weight_audit import Tensors
from kvant.models.weights import StoredWeights


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about one model's files. config: its config.json. are_decoded: quantised weights are decoded to
    the compute dtype while they are loaded. refusal: why its weights cannot be read on this machine.
    shape: the target's geometry and parameters; None for a drafter, whose shape follows its target's.
    tensors: from the headers of its files; None without files.
    """

    local: LocalModel
    config: Mapping[str, Any]
    checkpoint: CheckpointKV
    weights: StoredWeights
    are_decoded: bool
    refusal: ConfigError | None = None
    shape: ModelShape | None = None
    tensors: Tensors | None = None

    @property
    def parameters(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of a probed model's weights; none if Kvant lists them from the config."""
        return () if self.shape is None else self.shape.parameters


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the device's memory before anything is loaded. A CPU's total equals its free memory."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts of a plan. draft: facts of the drafter, if there is one. memory: None if not measured."""

    target: ModelFacts
    draft: ModelFacts | None = None
    memory: DeviceMemory | None = None
