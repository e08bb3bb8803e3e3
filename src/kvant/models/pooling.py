"""Reads how a checkpoint makes a vector of a text, from files of sentence-transformers. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.errors import BadCheckpoint, NotServable, WayOut
from kvant.kv.checkpoint.json_file import read_json_object

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODULES_NAME, POOLING_NAME = "modules.json", "1_Pooling/config.json"
_GENERATE = WayOut("generate text with it", ("--task", "generate"))
_NORM_FLOOR = 1e-12


class Task(StrEnum):
    """An engine's task. AUTO: embed if the checkpoint has files of sentence-transformers, else generate."""

    AUTO = "auto"
    GENERATE = "generate"
    EMBED = "embed"


@dataclass(frozen=True, slots=True)
class Pooling:
    """A text's vector: the last token's hidden state after the final norm, divided by its norm.

    size: number of dimensions. dimensions: smaller numbers to which the vector may be cut; with
    any_dimension, it may be cut to any number.
    """

    size: int
    dimensions: tuple[int, ...] = ()
    any_dimension: bool = False

    def allows(self, dimensions: int) -> bool:
        if dimensions == self.size or dimensions in self.dimensions:
            return True
        return self.any_dimension and 0 < dimensions <= self.size

    def refusal(self, dimensions: int) -> str:
        """Returns why a number of dimensions is not allowed, and which are."""
        known = ", ".join(map(str, (*self.dimensions, self.size)))
        return (
            f"dimensions is {dimensions}; this checkpoint gives {known}. If it was trained for others, set "
            '"is_matryoshka": true in its config.json'
        )

    def vector(
        self, hidden: bytes, dimensions: int | None = None, *, normalize: bool = True
    ) -> NDArray[np.float32]:
        """Returns the vector [dimensions] of a hidden state, given as `size` little-endian float32."""
        import numpy as np  # here, so that reading options does not import it

        found = np.frombuffer(hidden, "<f4")[:dimensions].astype(np.float64)
        if normalize:
            found /= max(float(np.linalg.norm(found)), _NORM_FLOOR)
        return found.astype(np.float32)


def choose_pooling(
    task: Task, path: Path, config: Mapping[str, Any], hidden_size: int
) -> Pooling | None:
    """Returns how an engine for the model in `path` pools; None for one that generates.

    Raises NotServable for a checkpoint that was trained with another pooling than the last token's.
    """
    modules = path / MODULES_NAME
    if task is Task.GENERATE or (task is Task.AUTO and not modules.is_file()):
        return None
    sizes = config.get("matryoshka_dimensions")
    found = Pooling(
        hidden_size,
        dimensions=tuple(one for one in sizes if isinstance(one, int) and 0 < one <= hidden_size)
        if isinstance(sizes, list)
        else (),
        any_dimension=config.get("is_matryoshka") is True and not isinstance(sizes, list),
    )
    if not modules.is_file():
        return found
    kinds = _kinds(modules)
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown or kinds[:1] != ["Transformer"]:
        raise _refused(path, f"{MODULES_NAME} lists {', '.join(unknown or kinds) or 'nothing'}")
    if (path / POOLING_NAME).is_file():
        pools = _pools(read_json_object(path / POOLING_NAME))
        if pools != ["lasttoken"]:
            raise _refused(path, f"{POOLING_NAME} pools by {', '.join(pools) or 'nothing'}")
    elif "Pooling" in kinds:
        raise _refused(path, f"{POOLING_NAME} is missing, which says how")
    return found


def _kinds(path: Path) -> list[str]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [str(one["type"]).rpartition(".")[2] for one in listed]
    except (OSError, ValueError, TypeError, KeyError):
        raise BadCheckpoint(
            f"{path} is no list of modules", why="sentence-transformers wrote none"
        ) from None


def _pools(config: Mapping[str, Any]) -> list[str]:
    named = config.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    prefix = "pooling_mode_"
    return [
        name.removeprefix(prefix)
        for name, is_on in config.items()
        if is_on is True and name.startswith(prefix)
    ]


def _refused(path: Path, why: str) -> NotServable:
    return NotServable(
        f"{path.name} does not make its embeddings from the last token alone",
        why=why,
        ways_out=(_GENERATE, WayOut("serve it with sentence-transformers")),
    )
