"""Files that a command writes when it is done: looked at before it begins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvant.errors import BadValue


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The path, for typer. BadValue where no file could be written: minutes of measuring would be lost."""
    if path is None:
        return None
    folder = path.absolute().parent
    why = ""
    if path.is_dir():
        why = "it is a directory"
    elif not folder.is_dir():
        why = f"there is no directory {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "it may not be written"
    if why:
        raise BadValue(f"{option.opts[0]} {path} cannot be written", why=why)
    return path


OutFile = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Write what was measured as JSON.", callback=writable
    ),
]
"""`out: OutFile = None` of a command that measures."""


def write_json(path: Path, body: object) -> None:
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
