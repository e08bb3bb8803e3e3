"""Every performance table of README and docs: one function each, from JSON to cells."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Cells = Sequence[Sequence[str]]

_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?%|x)?|-|not run|\d+ of \d+")
TABLES: dict[str, tuple[Callable[..., Cells], tuple[str, ...]]] = {}


def table(name: str, *files: str) -> Callable[[Callable[..., Cells]], Callable[..., Cells]]:
    """Registers a function that turns JSON files into cells; its first line of cells is the head."""

    def add(function: Callable[..., Cells]) -> Callable[..., Cells]:
        assert name not in TABLES, f"two tables {name}"
        TABLES[name] = (function, files)
        return function

    return add


def markdown(name: str, data: Path) -> list[str]:
    """Returns the lines of one table; columns of numbers, except the first, are aligned right."""
    function, files = TABLES[name]
    loaded: list[Any] = [json.loads((data / f).read_text(encoding="utf-8")) for f in files]
    head, *rows = function(*loaded)
    assert all(len(row) == len(head) for row in rows), f"{name}: lines of unequal length"
    rules = [
        "---:" if i and _numbers([row[i] for row in rows]) else "---" for i in range(len(head))
    ]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rules, *rows)]


def _numbers(cells: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(cell) for cell in cells)


def percent(share: float, *, sign: bool = False, digits: int = 0) -> str:
    """Formats 0.047 as `5 %`, with sign `+5 %`."""
    return f"{share * 100:{'+' if sign else ''}.{digits}f} %"


def held(value: float, goal: float, *, least: bool = False, shown: str = "") -> str:
    """Formats a goal and its result: `at most 290: met`, or by how much it was missed."""
    met = value >= goal if least else value <= goal
    off = (goal - value) / goal if least else (value - goal) / goal
    far = percent(off) if off >= 0.005 else "less than 1 %"
    return f"{shown or f'{goal:g}'}: " + ("met" if met else f"missed by {far}")


for _module in pkgutil.iter_modules(__path__):
    if _module.name != "__main__":
        importlib.import_module(f"{__name__}.{_module.name}")
