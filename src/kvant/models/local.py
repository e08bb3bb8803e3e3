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
    """What `locate` found.

    path: a directory in transformers' format. Located without weights it holds what a plan needs
        (config.json, and other small JSON files where the source has them) and may hold no more.
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
    """Called during long work, from any thread; `done` never falls within a task.

    task: a short description; done, total: bytes, or what `unit` says. The last call has done == total. A
    total of 0 is a phase of unknown length, which lasts until the next task.
    """

    def __call__(self, task: str, done: int, total: int, unit: str = "bytes") -> None: ...
