"""Finds the directory on this machine for a model's name.

A name is, in this order: the demo model's (`smollm2`) or a shipped drafter's (`smollm2-dflash`), an
existing directory or .gguf file, or a hub id (`owner/model`). The result is always a
directory in transformers' format; with weights=False it may hold no more than a plan needs, and
neither torch nor transformers is imported.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from kvant.errors import BadValue, ModelNotFound, WayOut
from kvant.models import directory, hub
from kvant.models.demo import DEMO_NAME, INSTALL, NOTICE, SAMPLING, demo_gguf, demo_license
from kvant.models.local import LocalModel, ModelSource, Progress

__all__ = ["LocalModel", "ModelSource", "Progress", "locate"]

SHIPPED = ("smollm2-dflash",)
"""Drafters that come with Kvant: directories in z-lab's checkpoint format."""

_DRAFTERS = Path(__file__).parents[1] / "drafters"


def locate(
    name: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    blocks: bool = False,
    progress: Progress | None = None,
) -> LocalModel:
    """Finds the model called `name`. Fetches or converts it if it is not here yet.

    revision: for hub models only. weights: whether the model will be loaded. If not, only files for a plan
    are fetched or converted, and a model that Kvant can plan but would not load (pickled weights, remote
    code) is returned, with the reason in its obstacles. blocks: matrices of a GGUF file keep their blocks,
    see `import_gguf`; only Kvant's loader reads such a directory.

    Raises ModelNotFound, BadCheckpoint or another ConfigError, and leaves no partial files.
    """
    shipped = _DRAFTERS / name if name in SHIPPED else None
    path = _existing(name) if shipped is None else shipped
    if name != DEMO_NAME and path is None:
        if not hub.is_hub_id(name):
            raise _not_found(name)
        return hub.fetch(name, revision=revision, weights=weights, progress=progress)
    if revision is not None:
        raise BadValue(
            f"--revision {revision}: only hub models have revisions",
            why=f"{name} is on this machine",
            ways_out=[WayOut("leave --revision out")],
        )
    if name == DEMO_NAME or path is None:
        return _demo(weights, blocks, progress)
    if shipped is not None:
        return LocalModel(shipped, name, None, ModelSource.SHIPPED)
    if path.is_dir():
        return _directory(path, name, weights, blocks, progress)
    return _file(path, name, weights, blocks, progress)


def _existing(name: str) -> Path | None:
    """Returns `name` as a path if it exists, else None. Raises ModelNotFound if it cannot be accessed."""
    if not name.strip() or "\0" in name:
        return None
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # RuntimeError: "~someone" without a home directory
        raise ModelNotFound(
            f"no model {name[:200]!r}",
            why=str(error)[:300],
            ways_out=[WayOut("name a directory, a .gguf file, or a hub id")],
        ) from error


def _demo(weights: bool, blocks: bool, progress: Progress | None) -> LocalModel:
    # Imported here, as in `_gguf`, because other models do not need numpy and gguf.
    from kvant.models.gguf_import import Attribution, import_gguf

    path = import_gguf(
        demo_gguf(),
        weights=weights,
        blocks=blocks,
        progress=progress,
        attribution=Attribution(NOTICE, demo_license(), SAMPLING),
    )
    return LocalModel(path, DEMO_NAME, None, ModelSource.DEMO)


def _gguf(
    path: Path, name: str, weights: bool, blocks: bool, progress: Progress | None
) -> LocalModel:
    from kvant.models.gguf_import import import_gguf

    converted = import_gguf(path, weights=weights, blocks=blocks, progress=progress)
    return LocalModel(converted, name, None, ModelSource.GGUF)


def _directory(
    path: Path, name: str, weights: bool, blocks: bool, progress: Progress | None
) -> LocalModel:
    ggufs = directory.gguf_files(path)
    if ggufs and not any(path.glob("*.safetensors")):
        if len(ggufs) == 1:
            return _gguf(ggufs[0], name, weights, blocks, progress)
        if not (path / directory.CONFIG_NAME).is_file():
            raise ModelNotFound(
                f"{path} holds {len(ggufs)} .gguf files",
                why=f"they are {', '.join(file.name for file in ggufs[:4])}",
                ways_out=[WayOut(f"name one of them, such as {ggufs[0]}")],
            )
    refusal = directory.obstacle(path)
    if refusal is not None and weights:
        raise refusal
    obstacles = () if refusal is None else (directory.as_obstacle(refusal),)
    return LocalModel(path, name, None, ModelSource.DIRECTORY, obstacles=obstacles)


def _file(
    path: Path, name: str, weights: bool, blocks: bool, progress: Progress | None
) -> LocalModel:
    if path.suffix.lower() == ".gguf":
        return _gguf(path, name, weights, blocks, progress)
    raise ModelNotFound(
        f"{name} is a file, and no .gguf file",
        ways_out=[WayOut(f"name the directory it is in: {path.parent}")],
    )


def _not_found(name: str) -> ModelNotFound:
    near = difflib.get_close_matches(name.lower(), [DEMO_NAME, *SHIPPED], cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ModelNotFound(
        f"no model {name!r}{hint}",
        why="no directory or .gguf file of that name exists, and it does not look like a hub id",
        tried=[
            f"the path {Path(name).absolute()}",
            "hub ids, which look like owner/model",
        ],
        ways_out=[
            WayOut(
                "name a directory with config.json, a .gguf file, or a hub id such as Qwen/Qwen3-8B"
            ),
            WayOut(f"use the demo model {DEMO_NAME} ({INSTALL})"),
        ],
    )
