"""What a plan of a damaged config.json accepts, an engine starts: every field of some families, in turn."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvant import LLM
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import ConfigError
from kvant.plan.plan import PlanRequest
from tests.models import tiny
from tests.planned import plan_of

pytestmark = pytest.mark.slow

_GONE = object()
VALUES: tuple[Any, ...] = (
    _GONE, None, math.nan, 0, -1, 3, 1.5, 2**40, 1e300, True, False, "x", [], {},
)  # fmt: skip
_NAMES = ("model_type", "architectures", "transformers_version")


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


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "mixtral", "gemma2", "olmo2"])
def test_a_plan_accepts_only_what_starts(family: str, tmp_path: Path) -> None:
    path = tiny.build(family, tmp_path)
    whole = json.loads((path / "config.json").read_text())
    accepted, wrong = 0, []
    for at in [*_fields(whole), ("rope_scaling",), ("head_dim",), ("layer_types",)]:
        for value in VALUES:
            (path / "config.json").write_text(json.dumps(_changed(whole, at, value)))
            try:
                found = plan_of(PlanRequest(str(path), DeviceFacts(DeviceKind.CPU)))
            except ConfigError:
                continue
            if not found.can_run:
                continue
            accepted += 1
            try:
                LLM(path, kv_cache_memory="1MiB")
            except Exception as fault:  # a traceback is worse than a refusal
                shown = "missing" if value is _GONE else value
                wrong.append((".".join(at), shown, f"{type(fault).__name__}: {fault}"))
    assert not wrong
    assert accepted > 30
