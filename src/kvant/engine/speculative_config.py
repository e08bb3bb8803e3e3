"""`--speculative-config`: the drafter, as JSON in vLLM's words, parsed once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvant.errors import BadValue, UnknownName
from kvant.kv.names import parse_format
from kvant.kv.request import Asked

FLAG = "--speculative-config"
_METHODS = ("dflash",)
_KEYS = ("method", "model", "num_speculative_tokens", "kv_cache_dtype", "revision")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """A drafter. num_speculative_tokens None: as many as its block allows."""

    method: str
    model: str
    num_speculative_tokens: int | None = None
    kv_cache_dtype: Asked | None = None
    revision: str | None = None


def parse_speculative_config(given: str | Mapping[str, Any]) -> SpeculativeConfig:
    """From JSON text or a mapping; BadValue for anything that is not understood."""
    body: Any = given
    if isinstance(given, str):
        try:
            body = json.loads(given)
        except json.JSONDecodeError as fault:
            raise BadValue(f"{FLAG}: {given!r} is no JSON", why=str(fault)) from None
    if not isinstance(body, Mapping):
        raise BadValue(f"{FLAG}: expected an object, got {type(body).__name__}")
    unknown = [key for key in body if key not in _KEYS]
    if unknown:
        raise UnknownName("key", str(unknown[0]), _KEYS, asked_by=FLAG)
    method, model = body.get("method"), body.get("model")
    if method not in _METHODS:
        raise UnknownName("method", str(method), _METHODS, asked_by=FLAG)
    if not isinstance(model, str) or not model:
        raise BadValue(f"{FLAG}: model is missing", why="name the drafter's directory or hub id")
    count = body.get("num_speculative_tokens")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise BadValue(f"{FLAG}: num_speculative_tokens {count!r}", why="it is a count, 1 or more")
    wanted = None
    if (name := body.get("kv_cache_dtype")) is not None:
        by = f"{FLAG} kv_cache_dtype {name}"
        wanted = Asked(parse_format(str(name), asked_by=by), by)
    return SpeculativeConfig(method, model, count, wanted, body.get("revision"))
