"""Replaces values of a checkpoint's config.json, as `--hf-overrides` asks, in a directory of links to it.

Kvant and transformers read config.json in several places. A directory with another config.json reaches all
of them, and its path keeps cached pages of different values apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvant.errors import BadValue, WayOut
from kvant.kv.checkpoint.json_file import parse_option_object, read_json_object
from kvant.models.directory import CONFIG_NAME
from kvant.models.import_cache import RECORD, imports_directory, is_complete, making, seal
from kvant.models.local import LocalModel

_ROPE, _FORMER_ROPE = "rope_parameters", "rope_scaling"


@dataclass(frozen=True, slots=True)
class ConfigOverrides:
    """Values that replace those of config.json. text: a JSON object, whose sections are merged."""

    text: str

    @property
    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found


def parse_overrides(given: str | Mapping[str, Any], *, asked_by: str) -> ConfigOverrides | None:
    """Parses JSON text or a mapping. Returns None for an empty object. Raises BadValue, naming `asked_by`."""
    way_out = WayOut('give fields of config.json: {"max_position_embeddings": 131072}')
    body = parse_option_object(given, asked_by=asked_by, way_out=way_out)
    return ConfigOverrides(json.dumps(body, sort_keys=True)) if body else None


def with_overrides(local: LocalModel, overrides: ConfigOverrides) -> LocalModel:
    """Returns the model in a directory of links, whose config.json has the values of `overrides`.

    The directory is made once, in the cache of imported models. Raises ConfigError if that fails.
    """
    config = read_json_object(local.path / CONFIG_NAME)
    _refuse_misplaced(config, overrides.values)
    merged = _merged(config, overrides.values)
    left_out = (CONFIG_NAME, RECORD)
    sources = {
        entry.name: entry.resolve() for entry in local.path.iterdir() if entry.name not in left_out
    }
    text = json.dumps(merged, indent=2, ensure_ascii=False) + "\n"
    places = "\n".join(f"{name}\t{place}" for name, place in sorted(sources.items()))
    digest = hashlib.sha256(f"{local.path.resolve()}\n{places}\n{text}".encode()).hexdigest()
    final = imports_directory("overrides") / f"{local.path.name}-{digest[:16]}"
    if not is_complete(final):
        with making(final, len(text)) as partial:
            if partial is not None:
                for name, place in sources.items():
                    (partial / name).symlink_to(place)
                (partial / CONFIG_NAME).write_text(text, encoding="utf-8")
                seal(partial, {"from": str(local.path), "overrides": overrides.values})
    names = ", ".join(_names(overrides.values))
    return replace(
        local, path=final, notes=(*local.notes, f"--hf-overrides replaces {names} of {CONFIG_NAME}")
    )


def _refuse_misplaced(config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises BadValue for a decoder's field beside the section of the decoder, where nothing reads it."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return
    for name, value in values.items():
        names = (_ROPE, _FORMER_ROPE) if name in (_ROPE, _FORMER_ROPE) else (name,)
        if any(one in text for one in names) and not any(one in config for one in names):
            inside = json.dumps({"text_config": {name: value}})
            raise BadValue(
                f"--hf-overrides: {name} stands in text_config of {CONFIG_NAME}",
                why="beside that section nothing reads it",
                ways_out=(WayOut("replace it there", ("--hf-overrides", inside)),),
            )


def _merged(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` with `values`. Sections are merged, lists and other values are replaced."""
    found = dict(config)
    for name, value in values.items():
        name = _present_name(name, found)
        before = found.get(name)
        if isinstance(value, Mapping):
            value = _merged(before if isinstance(before, Mapping) else {}, value)
        found[name] = value
    return found


def _present_name(name: str, config: dict[str, Any]) -> str:
    """Returns the name that this config.json has for its rotary section, which has two names."""
    names = (_ROPE, _FORMER_ROPE)
    if name not in names:
        return name
    return next((one for one in names if isinstance(config.get(one), Mapping)), name)


def _names(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"
