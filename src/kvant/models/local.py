"""A model on this machine, in transformers' directory format, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol


class ModelSource(Enum):
    DIRECTORY = "directory"
    HUB = "hub"
    GGUF = "gguf"
    DEMO = "demo"
    SHIPPED = "shipped"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that `locate` found.

    path: a directory in transformers' format. If located without weights, it may have only the files for a
        plan (config.json, and other small JSON files if the source has them).
    name: as the user wrote it.
    revision: the hub's commit hash, None for every other source.
    notes: messages for the user, such as that the hub was not asked. obstacles: why this model can be
        planned but not loaded; empty if it was located with weights.
    """

    path: Path
    name: str
    revision: str | None
    source: ModelSource
    notes: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()


class Progress(Protocol):
    """Called during long work, from any thread. `done` never decreases within a task.

    task: a short description. done, total: in bytes, or in `unit`. The last call has done == total. A
    total of 0 means a phase of unknown length, which lasts until the next task.
    """

    def __call__(self, task: str, done: int, total: int, unit: str = "bytes") -> None: ...
