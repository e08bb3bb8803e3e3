"""What planning knows about the models' files and the device's memory. `read_facts` fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvant.errors import ConfigError
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.models.local import LocalModel
from kvant.models.shape import ModelShape
from kvant.models.weights import StoredWeights


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model's files. config: its config.json. are_decoded: codes of its weights become numbers of the
    compute dtype while they are loaded. refusal: why its weights cannot be read on this machine.
    shape: of a target, None for a drafter, whose shape follows its target's.
    """

    local: LocalModel
    config: Mapping[str, Any]
    checkpoint: CheckpointKV
    weights: StoredWeights
    are_decoded: bool
    refusal: ConfigError | None = None
    shape: ModelShape | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of this machine's device before anything is loaded. A CPU's total is its free memory."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Facts:
    """draft: the drafter's, for a method that has one. memory: None to plan without this machine's."""

    target: ModelFacts
    draft: ModelFacts | None = None
    memory: DeviceMemory | None = None
