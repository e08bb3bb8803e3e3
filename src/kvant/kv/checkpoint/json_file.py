"""Reads external JSON: an object with distinct keys, from a file or as the value of an option."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvant.errors import BadCheckpoint, BadValue, WayOut

MAX_JSON_BYTES = 256 * 2**20
"""Above any config or index seen; the index of a model with 100,000 tensors takes about 10 MB."""

COPY_AGAIN = WayOut("fetch the model's files again and compare their sizes with the source's")
"""The way out of a damaged or incomplete file."""

INCOMPLETE = "the files are incomplete or of another model"
"""The reason for weights that no file has."""

COMPARE_CONFIG = WayOut("compare config.json with the one the model was published with")
"""The way out of a config.json that is wrong, or that the weights do not fit."""

_MOST_SHOWN = 200
_LFS = b"version https://git-lfs"


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises BadCheckpoint if there is no such file or object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BadCheckpoint(f"{path} is too large", why=f"over {MAX_JSON_BYTES} bytes of JSON")
        data = path.read_bytes()
    except OSError as fault:
        raise BadCheckpoint(f"{path} cannot be read", why=fault.strerror or str(fault)) from None
    refuse_lfs_pointer(data, path)
    return parse_json_object(data, path)


def parse_json_object(data: bytes, path: Path) -> dict[str, Any]:
    """Parses `data`, read from `path`, as a JSON object with distinct keys at every level."""
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as fault:
        raise _no_object(path, _first_line(fault)) from None
    if not isinstance(found, dict):
        raise _no_object(path, f"it holds a {type(found).__name__}")
    return found


def _no_object(path: Path, why: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} is no JSON object", why=why, ways_out=(COPY_AGAIN,))


def parse_option_object(
    given: str | Mapping[str, Any], *, asked_by: str, way_out: WayOut | None = None
) -> Mapping[str, Any]:
    """Parses an option whose value is a JSON object, as text or as a mapping.

    Raises BadValue, naming `asked_by`. way_out: an object to give instead.
    """
    ways_out = () if way_out is None else (way_out,)
    body: Any = given
    if isinstance(given, str):
        try:
            body = json.loads(given, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as fault:
            shown = given if len(given) <= _MOST_SHOWN else given[:_MOST_SHOWN] + ".."
            raise BadValue(
                f"{asked_by}: {shown!r} is not JSON", why=_first_line(fault), ways_out=ways_out
            ) from None
    if not isinstance(body, Mapping):
        what = f"{asked_by}: expected an object, got {type(body).__name__}"
        raise BadValue(what, ways_out=ways_out)
    return body


def refuse_lfs_pointer(head: bytes, path: Path) -> None:
    """A clone without git-lfs leaves small text files where the weights should be."""
    if head.startswith(_LFS):
        raise BadCheckpoint(
            f"{path} is a Git LFS pointer, not the file itself",
            why="the directory was cloned without git-lfs",
            ways_out=(WayOut("fetch the files: run `git lfs pull` in that directory"),),
        )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} appears twice in one object")
    return found


def _first_line(fault: Exception) -> str:
    return (str(fault).splitlines() or [type(fault).__name__])[0]
