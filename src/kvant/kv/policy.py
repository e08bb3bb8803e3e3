"""The YAML policy file: a KV request stored in a file.

kv_cache_dtype: fp8                    # optional, weaker than the flag
skip_layers: [sliding_window, -1]      # optional
rules:                                 # optional; the closest selector wins, order does not matter
  - 0-3: bf16
  - {layers: "re:.*global.*", k: nvfp4, v: model}
  - {layers: 4-7, recent_tokens: 256}  # wide rows of these layers; 0 for none
recent_tokens: 128                     # optional, with sink_tokens and recent_dtype: rows that are wide too
recent_dtype: k=model                  # optional: F, K/V, or the one side that is wide: k=F, v=F
draft: {kv_cache_dtype: bf16, skip_layers: [], rules: []}
model: {name: smollm2, fingerprint: 0123456789abcdef}   # optional; other models are refused
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from kvant.errors import BadValue
from kvant.kv.names import parse_format, parse_one, parse_sides
from kvant.kv.request import (
    Asked,
    AskedWide,
    KVRequest,
    MadeFor,
    Requests,
    Skip,
    WideRule,
    parse_rule,
    parse_selectors,
    rules_for,
)
from kvant.kv.wide import ask_wide

_KEYS = ("kv_cache_dtype", "skip_layers", "rules")
_MOST_SHOWN = 80  # characters of a wrong value
_WIDE_KEYS = ("recent_tokens", "sink_tokens", "recent_dtype")


def read_policy(path: Path) -> Requests:
    """Parses a policy file; BadValue names the file and the place."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise BadValue(f"--kv-cache-policy {path}: cannot be read", why=str(fault)) from None
    except (yaml.YAMLError, UnicodeError, RecursionError) as fault:
        raise BadValue(f"--kv-cache-policy {path}: is no YAML", why=str(fault)) from None
    body = dict(_mapping(document, str(path)))
    draft, made_for = body.pop("draft", {}), body.pop("model", None)
    wide = {key: body.pop(key) for key in _WIDE_KEYS if key in body}
    rows = _wide_rows(wide, str(path))
    target = replace(_section(body, str(path), _WideRules(rows)), wide=rows)
    if made_for is not None:
        target = replace(target, made_for=(_made_for(made_for, f"{path}: model"),))
    return Requests(target, _section(draft, f"{path}: draft"))


def _made_for(body: object, where: str) -> MadeFor:
    said = _mapping(body, where)
    name, fingerprint = said.get("name"), said.get("fingerprint")
    if set(said) != {"name", "fingerprint"} or not isinstance(fingerprint, str):
        raise BadValue(f"{where}: {body!r}", why="keys are name and fingerprint, which is text")
    return MadeFor(str(name), fingerprint, where)


@dataclass(frozen=True, slots=True)
class _WideRules:
    """Rules may ask for wide rows. rest: of all layers, for what a rule leaves out."""

    rest: AskedWide | None


def _wide_rows(
    body: Mapping[str, Any], where: str, rest: AskedWide | None = None
) -> AskedWide | None:
    """Returns the target's rows that are stored wide too. rest: of what is left out."""
    if not body:
        return None
    for key in ("recent_tokens", "sink_tokens"):
        number = body.get(key, 0)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise BadValue(f"{where}: {key} {number!r}", why="it is a number of tokens")
    stored, by = body.get("recent_dtype"), f"{where}: {', '.join(body)}"
    format_ = None if stored is None else parse_sides(str(stored), asked_by=by)
    recent, sink = body.get("recent_tokens"), body.get("sink_tokens")
    if rest is not None and recent != 0:
        recent = rest.recent if recent is None else recent
        sink = rest.sink if sink is None else sink
        format_ = rest.format if format_ is None else format_
    return ask_wide(sink, recent, format_, asked_by=by)


def _section(body: object, where: str, wide: _WideRules | None = None) -> KVRequest:
    """wide: None where rules cannot ask for wide rows."""
    section = _mapping(body, where)
    unknown = [key for key in section if key not in _KEYS]
    if unknown:
        known = _KEYS if wide is None else (*_KEYS, *_WIDE_KEYS, "draft", "model")
        raise BadValue(f"{where}: unknown key {unknown[0]!r}", why=f"known are {', '.join(known)}")
    request = KVRequest()
    if (name := section.get("kv_cache_dtype")) is not None:
        by = f"{where}: kv_cache_dtype {name}"
        request = KVRequest(explicit=(Asked(parse_format(str(name), asked_by=by), by),))
    for entry in _list(section.get("skip_layers"), f"{where}: skip_layers"):
        by = f"{where}: skip_layers {entry}"
        skips = tuple(Skip(s, by) for s in parse_selectors(str(entry), asked_by=by))
        request = replace(request, skips=request.skips + skips)
    for number, entry in enumerate(_list(section.get("rules"), f"{where}: rules")):
        request = request.merged(_rule(entry, f"{where}: rules[{number}]", wide))
    return request


def _rule(entry: object, where: str, wide: _WideRules | None) -> KVRequest:
    """One rule: "0-3:bf16", {0-3: bf16}, or {layers: .., k: .., v: .., recent_tokens: ..}."""
    if isinstance(entry, str):
        return _target_rule(entry, where)
    rule = _mapping(entry, where)
    if "layers" not in rule:
        if len(rule) != 1:
            raise BadValue(
                f"{where}: {entry!r} is no rule", why="write LAYERS: FORMAT, or layers, k, v"
            )
        ((layers, wanted),) = rule.items()
        return _target_rule(f"{layers}:{wanted}", where)
    known = ("layers", "k", "v", *(() if wide is None else _WIDE_KEYS))
    if any(key not in known for key in rule) or len(rule) < 2:
        raise BadValue(
            f"{where}: {entry!r} is no rule",
            why=f"it has the key layers, and one or more of {', '.join(known[1:])}",
        )
    layers, request = str(rule["layers"]), KVRequest()
    if "k" in rule or "v" in rule:
        k, v = (
            parse_one(str(rule[side]), asked_by=f"{where}.{side}") if side in rule else None
            for side in ("k", "v")
        )
        request = rules_for(layers, k, v, asked_by=where)
    rows = {key: rule[key] for key in _WIDE_KEYS if key in rule}
    if wide is None or not rows:
        return request
    asked = _wide_rows(rows, where, wide.rest)
    selectors = parse_selectors(layers, asked_by=where)
    return replace(request, wide_rules=tuple(WideRule(one, asked, where) for one in selectors))


def _target_rule(text: str, where: str) -> KVRequest:
    parsed = parse_rule(text, asked_by=where)
    if parsed.draft.rules:
        raise BadValue(f"{where}: {text!r}", why="rules of the drafter stand under the key draft")
    return parsed.target


def _mapping(body: object, where: str) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        what = "it is empty" if body is None else f"it is {repr(body)[:_MOST_SHOWN]}"
        raise BadValue(f"{where} holds no lines of KEY: VALUE", why=what)
    return {str(key): value for key, value in body.items()}


def _list(body: object, where: str) -> list[object]:
    if body is None:
        return []
    if not isinstance(body, list):
        raise BadValue(f"{where} is no list", why=f"it is {repr(body)[:_MOST_SHOWN]}")
    return body
