"""Damaged config.json files: what a plan accepts, an engine must start."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvant.errors import ConfigError
from kvant.plan.plan import Plan

_GONE = object()
_VALUES: tuple[Any, ...] = (
    _GONE, None, math.nan, 0, -1, 3, 1.5, 2**40, 1e300, True, False, "x", [], {}, [1.5],
)  # fmt: skip
_NAMES = ("model_type", "architectures", "transformers_version")
_LONG = {"short_factor": [1.0], "long_factor": [1.0], "original_max_position_embeddings": 64}
_ROPES: tuple[dict[str, Any], ...] = tuple(
    {"rope_type": kind, **more}
    for kind in ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "x", None, 3)
    for more in ({}, {"factor": 2.0}, {"factor": 0}, {"factor": 4.0, "beta_fast": -3, **_LONG})
)
_SECTIONS = ("rope_parameters", "rope_scaling")


def refused_late(path: Path, plan: Callable[[], Plan], start: Callable[[], object]) -> list[str]:
    """Returns what `start` refuses of what `plan` accepts, with every field of config.json wrong in turn.

    path: the directory of the config that is damaged.
    """
    file = path / "config.json"
    whole = json.loads(file.read_text())
    accepted, found = 0, []
    for at, value in _damages(whole):
        file.write_text(json.dumps(_changed(whole, at, value)))
        try:
            if not plan().can_run:
                continue
        except ConfigError:
            continue
        accepted += 1
        try:
            start()
        except Exception as fault:  # a traceback is worse than a refusal
            shown = "missing" if value is _GONE else value
            found.append(f"{'.'.join(at)} {shown}: {type(fault).__name__}: {fault}")
    file.write_text(json.dumps(whole))
    assert accepted > 30
    return found


def _damages(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    places = dict.fromkeys([*_fields(config), ("head_dim",), ("layer_types",)])
    for at in places:
        for value in _VALUES:
            yield at, value
    for name in _SECTIONS:
        for rope in (*_ROPES, *({"full_attention": one} for one in _ROPES)):
            yield (name,), rope


def _fields(config: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        if name not in _NAMES:
            yield (*at, name)
            if isinstance(value, dict):
                yield from _fields(value, (*at, name))


def _changed(config: dict[str, Any], at: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    section = changed
    for name in at[:-1]:
        section = section[name]
    section.pop(at[-1], None)
    if value is not _GONE:
        section[at[-1]] = value
    return changed
