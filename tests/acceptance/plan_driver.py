"""Runs `kvant plan` in this process, as the command line would."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from kvant.cli.main import app


def plan(model: Path | str, *arguments: str) -> dict[str, Any]:
    """The plan's JSON; ConfigError where the command would exit with 2."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app(["plan", str(model), "--format", "json", *arguments], standalone_mode=False)
    body: dict[str, Any] = json.loads(out.getvalue())
    return body


def formats(body: dict[str, Any], side: str = "k", part: str = "target") -> list[str | None]:
    """Format of one side of every layer; None where nothing is stored."""
    return [
        None if layer[side] is None else layer[side]["format"] for layer in body[part]["layers"]
    ]


def sources(body: dict[str, Any], side: str = "k", part: str = "target") -> list[str | None]:
    return [
        None if layer[side] is None else layer[side]["source"] for layer in body[part]["layers"]
    ]


def scale_states(body: dict[str, Any], side: str = "k") -> list[str]:
    return [layer[side]["scale"]["state"] for layer in body["target"]["layers"] if layer[side]]
