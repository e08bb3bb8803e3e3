"""What travels between rank 0 and another rank, over sockets that only these two processes have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvant.kv.saturation import Saturated
from kvant.models.sharding.shard import Shard
from kvant.parallel.mirror import SentStep
from kvant.plan.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Start:
    """Become one rank of an engine. fingerprint: `plan_fingerprint` of rank 0's plan.

    gpu: the device's index, None on a CPU. directory: where ranks meet. num_threads: torch's on a CPU.
    """

    config: EngineConfig
    shard: Shard
    fingerprint: str
    num_pages: int
    gpu: int | None
    directory: Path
    num_threads: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Meet the other ranks and make the pool."""


@dataclass(frozen=True, slots=True)
class Capture:
    """`ModelRunner.capture`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Zero:
    """`Runner.zero`."""

    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class CountSaturated:
    """Answer with `Counted`."""


ToRank = Start | Connect | Capture | Zero | CountSaturated | SentStep


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank's weights are on its device."""


@dataclass(frozen=True, slots=True)
class Counted:
    saturated: tuple[Saturated, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank ends. text: why."""

    text: str


FromRank = Loaded | Counted | Failed
