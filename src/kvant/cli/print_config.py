"""`--print-config`: a YAML file for --config, with the source of each value as a comment."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kvant.plan.options import Option, Value
from kvant.plan.settings import Said, Settings


def config_lines(options: Iterable[Option], settings: Settings) -> list[str]:
    """One line for each option. Secrets are counted in a comment, not shown."""
    shown = [
        (_entry(option, settings), _who(option, settings))
        for option in options
        if not option.hidden
    ]
    width = max(len(entry) for entry, _ in shown if len(entry) < 48)
    return [f"{entry:{width}}  # {who}" for entry, who in shown]


def _entry(option: Option, settings: Settings) -> str:
    said = settings.get(option.name)
    value = option.default if said is None else said.value
    if option.secret and said is not None:
        count = len(value) if isinstance(value, tuple) else 1
        return f"# {option.name}: {count} not shown"
    return f"{option.name}: {_yaml(value)}".rstrip()


def _yaml(value: Value | None) -> str:
    """JSON is YAML."""
    if value is None:
        return ""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _who(option: Option, settings: Settings) -> str:
    said = settings.said.get(option.name, ())
    if not said:
        return f"default: {option.unset}" if option.default is None else "default"
    line = _place(option, said[0])
    for weaker in said[1:]:
        value = "" if option.secret else f" {_yaml(weaker.value)}"
        line += f"; over {_place(option, weaker)}{value}"
    return line


def _place(option: Option, said: Said) -> str:
    return said.by.removesuffix(f": {option.name}")
