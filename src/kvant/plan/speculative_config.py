"""Parses `--speculative-config`: how tokens are drafted, as JSON with vLLM's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvant.errors import BadValue, UnknownName, WayOut
from kvant.kv.checkpoint.json_file import parse_option_object
from kvant.kv.names import parse_format
from kvant.kv.request import Asked
from kvant.speculative.methods import METHODS, Method, find_method

FLAG = "--speculative-config"
_KEYS = ("method", "num_speculative_tokens", "adaptive")
_MODEL_KEYS = ("model", "kv_cache_dtype", "revision")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The request for speculative decoding. model: the drafter, "" for methods without one.

    num_speculative_tokens: the most drafts per sequence and step; None takes the drafter's block or the
    method's default. adaptive: draft fewer tokens while drafts do not pay. options: the method's own options.
    """

    method: Method
    model: str = ""
    num_speculative_tokens: int | None = None
    kv_cache_dtype: Asked | None = None
    revision: str | None = None
    adaptive: bool = True
    options: Mapping[str, int] = field(default_factory=dict)


def parse_speculative_config(
    given: str | Mapping[str, Any], *, asked_by: str = FLAG
) -> SpeculativeConfig:
    """Parses JSON text or a mapping. Raises BadValue or UnknownName, naming `asked_by`."""
    way_out = WayOut('give a JSON object in quotes: {"method": "ngram"}')
    body = parse_option_object(given, asked_by=asked_by, way_out=way_out)
    name = body.get("method")
    if not isinstance(name, str):
        names = ", ".join(method.name for method in METHODS)
        raise BadValue(f"{asked_by}: method is {name!r}", why=f"name a method: {names}")
    method = find_method(name, asked_by=asked_by)
    keys = (*_KEYS, *(_MODEL_KEYS if method.has_model else ()), *method.options)
    unknown = [str(key) for key in body if key not in keys]
    if unknown:
        raise UnknownName("key", unknown[0], keys, asked_by=f"{asked_by}, method {method.name}")
    model = body.get("model", "")
    if method.has_model and (not isinstance(model, str) or not model):
        raise BadValue(
            f"{asked_by}: model is missing", why="name the drafter's directory or hub id"
        )
    wanted = None
    if (dtype := body.get("kv_cache_dtype")) is not None:
        by = f"{asked_by} kv_cache_dtype {dtype}"
        wanted = Asked(parse_format(str(dtype), asked_by=by), by)
    revision = body.get("revision")
    if revision is not None and not isinstance(revision, str):
        raise BadValue(
            f"{asked_by}: revision is {revision!r}", why="it must be a branch, tag or commit"
        )
    adaptive = body.get("adaptive", True)
    if not isinstance(adaptive, bool):
        raise BadValue(f"{asked_by}: adaptive is {adaptive!r}", why="it must be true or false")
    return SpeculativeConfig(
        method=method,
        model=model,
        num_speculative_tokens=_count(body, "num_speculative_tokens", asked_by),
        kv_cache_dtype=wanted,
        revision=revision,
        adaptive=adaptive,
        options=_options(body, method, asked_by),
    )


def _options(body: Mapping[str, Any], method: Method, asked_by: str) -> dict[str, int]:
    given = {key: _count(body, key, asked_by) for key in method.options}
    options = {
        key: default if (asked := given[key]) is None else asked
        for key, default in method.options.items()
    }
    least, most = options.get("prompt_lookup_min"), options.get("prompt_lookup_max")
    if least is not None and most is not None and least > most:
        raise BadValue(
            f"{asked_by}: prompt_lookup_min {least} is more than prompt_lookup_max {most}",
            why="the shortest match is longer than the longest one",
        )
    return options


def _count(body: Mapping[str, Any], key: str, asked_by: str) -> int | None:
    count = body.get(key)
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise BadValue(f"{asked_by}: {key} {count!r}", why="it must be 1 or more")
    return count
