"""Check output files before a command starts, so that a long run does not fail at its end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvant.errors import BadValue


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Typer callback: return `path`, or raise BadValue if no file can be written there."""
    if path is None:
        return None
    folder = path.absolute().parent
    why = ""
    if path.is_dir():
        why = "it is a directory"
    elif not folder.is_dir():
        why = f"there is no directory {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "there is no permission to write it"
    if why:
        raise BadValue(f"{option.opts[0]} {path} cannot be written", why=why)
    return path


OutFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the measurements to this file as JSON.",
        callback=writable,
    ),
]
"""Type of the parameter `out: OutFile = None` of a command that measures."""


def write_json(path: Path, body: object) -> None:
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
