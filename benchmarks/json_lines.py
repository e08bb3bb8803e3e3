"""Files of JSON lines with texts to measure with: one object per line, such as a question and its answer."""

from __future__ import annotations

import json
from pathlib import Path

from kvant.errors import BadValue, WayOut


def read_texts(
    path: Path, *fields: tuple[str, ...], count: int, shortest: bool = False
) -> list[tuple[str, ...]]:
    """Returns one text per field for the first `count` lines, or for the shortest ones.

    fields: for each, alternative names, of which the first that an object has is read.
    Raises BadValue if the file is not such a file.
    """
    wanted = " and ".join(" or ".join(f"{name!r}" for name in names) for names in fields)
    what = f"it is a file of JSON lines with {wanted} in each"
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "it is no text in UTF-8"
        raise BadValue(
            f"no prompts at {path}: {reason}",
            why=what,
            ways_out=(WayOut("run where Kvant's repository is, or name another file"),),
        ) from None
    if shortest:
        lines.sort(key=len)
    found = []
    for number, line in enumerate(lines[:count], 1):
        try:
            found.append(_texts(json.loads(line), fields))
        except ValueError:
            where = "" if shortest else f", line {number}"
            raise BadValue(f"{path}{where}: {line[:60]!r} is no such line", why=what) from None
    return found


def _texts(body: object, fields: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Returns the texts of one object. Raises ValueError if one is missing or not a text."""
    given = body if isinstance(body, dict) else {}
    found = []
    for names in fields:
        text = next((given[name] for name in names if given.get(name)), None)
        if not isinstance(text, str):
            raise ValueError
        found.append(text)
    return tuple(found)
