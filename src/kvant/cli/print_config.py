"""`--print-config`: writes a YAML file for --config, with the source of each value as a comment."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kvant.plan.options import Option, Value
from kvant.plan.settings import Given, Settings


def config_lines(options: Iterable[Option], settings: Settings) -> list[str]:
    """Returns one line for each option. Secrets are only counted, in a comment."""
    shown = [
        (_entry(option, settings), _who(option, settings))
        for option in options
        if not option.hidden
    ]
    width = max(len(entry) for entry, _ in shown if len(entry) < 48)
    return [f"{entry:{width}}  # {who}" for entry, who in shown]


def _entry(option: Option, settings: Settings) -> str:
    given = settings.get(option.name)
    value = option.default if given is None else given.value
    if option.secret and given is not None:
        count = len(value) if isinstance(value, tuple) else 1
        return f"# {option.name}: {count} not shown"
    return f"{option.name}: {_yaml(value)}".rstrip()


def _yaml(value: Value | None) -> str:
    """Returns a value as JSON, which is also YAML; None as an empty text."""
    if value is None:
        return ""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _who(option: Option, settings: Settings) -> str:
    given = settings.given.get(option.name, ())
    if not given:
        return f"default: {option.unset}" if option.default is None else "default"
    line = _place(option, given[0])
    for weaker in given[1:]:
        value = "" if option.secret else f" {_yaml(weaker.value)}"
        line += f"; over {_place(option, weaker)}{value}"
    return line


def _place(option: Option, given: Given) -> str:
    return given.by.removesuffix(f": {option.name}")
