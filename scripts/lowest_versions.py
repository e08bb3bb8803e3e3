"""Print pip constraints that pin every direct dependency to the lowest version that pyproject.toml allows.

`make lowest` installs them and runs the fast tests.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_BOUND = re.compile(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)")
_NOT_INSTALLED = ("cuda", "flashinfer")  # need a GPU; torch's CUDA build pins its own cuda-bindings


def lowest(project: Mapping[str, Any]) -> Iterator[str]:
    """Returns `name==version` for every requirement of the project and its extras that has a lower bound."""
    extras = project["optional-dependencies"]
    tables = [project["dependencies"], *(v for k, v in extras.items() if k not in _NOT_INSTALLED)]
    for requirement in (line for table in tables for line in table):
        found = _BOUND.match(requirement)
        if found is not None:
            yield f"{found[1]}=={found[2]}"


if __name__ == "__main__":
    for line in lowest(tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]):
        print(line)
