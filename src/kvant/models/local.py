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
    notes: what the user should hear, such as that the hub was not asked. obstacles: why this model can
        be planned but not loaded; never of one that was located with weights.
    """

    path: Path
    name: str
    revision: str | None
    source: ModelSource
    notes: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()


class Progress(Protocol):
    """Called now and then during long work, from any thread, `done` never falling within a task.

    task: what is going on, in a few words; done, total: bytes. The last call has done == total.
    """

    def __call__(self, task: str, done: int, total: int) -> None: ...
