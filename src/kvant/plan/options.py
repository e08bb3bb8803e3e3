"""Declares options: values that users set by flag, environment variable, YAML file or Python argument.

The fields of configuration classes form the table of options:

    @dataclass(frozen=True, slots=True)
    class Limits:
        body_bytes: int = option(32 * 2**20, "Bytes of a request's body.", prefix="max_", low=1)

This field defines the flag --max-body-bytes, the variable KVANT_MAX_BODY_BYTES, the YAML key
max_body_bytes, the check of its values, and a line of docs/configuration.md. `kvant.plan.settings` reads
the values.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from kvant.errors import BadValue, UnknownName

Value = str | int | float | bool | tuple[str, ...]
"""Values of options; all of them can be written as JSON."""

PREFIX = "KVANT_"
_METADATA = "kvant.option"
_SWITCH_TEXTS = {"1": True, "true": True, "yes": True, "on": True,
                 "0": False, "false": False, "no": False, "off": False}  # fmt: skip


class Kind(Enum):
    """Types of values; the enum's values describe them in error messages."""

    TEXT = "a text (in YAML: in quotes)"
    COUNT = "a whole number"
    NUMBER = "a number"
    SWITCH = "true or false"
    TEXTS = "a list of texts (in YAML: in quotes)"
    LAYERS = "a list of layers"
    SIZE = "a size, such as 2GiB"
    OBJECT = "a JSON object"


_KINDS: dict[object, Kind] = {
    str: Kind.TEXT,
    int: Kind.COUNT,
    float: Kind.NUMBER,
    bool: Kind.SWITCH,
    tuple[str, ...]: Kind.TEXTS,
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option. name: its keyword argument and YAML key. field: its field in the configuration class.

    unset: describes the effect of the default None. low, high: inclusive bounds. flag_name: the flag, if
    it differs from the name. aliases: names that other programs use. short: further flags, as written.
    panel: heading in a command's help. secret: its value is never shown. hidden: absent from help and docs.
    """

    name: str
    field: str
    kind: Kind
    default: Value | None
    help: str
    unset: str = ""
    metavar: str | None = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    flag_name: str | None = None
    aliases: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    panel: str | None = None
    secret: bool = False
    hidden: bool = False

    @property
    def flag(self) -> str:
        return self.flag_name or _dashed(self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of the option; a switch also has --no- flags."""
        names = (self.flag, *(_dashed(alias) for alias in self.aliases))
        if self.kind is Kind.SWITCH:
            names = tuple(f"{name}/--no-{name.removeprefix('--')}" for name in names)
        return names + self.short

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def read(self, raw: object, where: str) -> Value:
        """Checks and converts a value from Python or YAML. Raises BadValue or UnknownName, naming `where`."""
        value = self._convert(raw)
        if value is None or not self._in_bounds(value):
            shown = "what was given" if self.secret else repr(raw)
            raise BadValue(f"{where} is {shown}", why=f"it must be {self.expects}")
        if self.choices and value not in self.choices:
            raise UnknownName("value", str(value), self.choices, asked_by=where)
        return value

    def read_text(self, text: str, where: str) -> Value:
        """Parses and checks the text of a variable. Spaces separate the items of a list."""
        raw: object = text
        if not text:
            raise BadValue(f"{where} is empty", why=f"it must be {self.expects}; or unset it")
        if self.kind is Kind.COUNT and re.fullmatch(r"[+-]?\d{1,18}", text.strip()):
            raw = int(text)
        elif self.kind is Kind.NUMBER:
            try:
                raw = float(text)
            except ValueError:
                raw = text
        elif self.kind is Kind.SWITCH:
            raw = _SWITCH_TEXTS.get(text.strip().lower(), text)
        elif self.kind in (Kind.TEXTS, Kind.LAYERS):
            raw = text.split()
        return self.read(raw, where)

    @property
    def expects(self) -> str:
        """The values that are allowed, in words."""
        if self.choices:
            return " or ".join(self.choices)
        bounds = ""
        if self.low is not None and self.high is not None:
            bounds = f" from {_exact(self.low)} to {_exact(self.high)}"
        elif self.low is not None:
            bounds = f", {_exact(self.low)} or more"
        return self.kind.value + bounds

    def _convert(self, raw: object) -> Value | None:
        """Returns the value in the option's type, or None if it cannot have that type."""
        if isinstance(raw, Path):
            raw = str(raw)
        is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
        match self.kind:
            case Kind.TEXT:
                return raw if isinstance(raw, str) else None
            case Kind.SWITCH:
                return raw if isinstance(raw, bool) else None
            case Kind.COUNT:
                return raw if isinstance(raw, int) and is_number else None
            case Kind.NUMBER:
                return _finite(raw) if is_number else None  # type: ignore[arg-type]
            case Kind.SIZE:
                return str(raw) if isinstance(raw, str | int) and raw is not True else None
            case Kind.OBJECT:
                if isinstance(raw, Mapping):
                    return _json(raw)
                return raw if isinstance(raw, str) else None
            case _:
                return self._convert_list(raw)

    def _convert_list(self, raw: object) -> tuple[str, ...] | None:
        items = [raw] if isinstance(raw, str | int) else raw
        if not isinstance(items, list | tuple):
            return None
        may_be = str | int if self.kind is Kind.LAYERS else str
        if any(isinstance(item, bool) or not isinstance(item, may_be) for item in items):
            return None
        return tuple(str(item) for item in items)

    def _in_bounds(self, value: Value) -> bool:
        if not isinstance(value, int | float):
            return True
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def _exact(bound: float) -> str:
    """Returns a bound with all its digits: 1048576, 0.5."""
    return str(int(bound)) if float(bound).is_integer() else str(bound)


def _finite(number: int | float) -> float | None:
    try:
        found = float(number)
    except OverflowError:  # an integer beyond the range of floats
        return None
    return found if math.isfinite(found) else None


def _json(mapping: Mapping[object, object]) -> str | None:
    """Returns a mapping as JSON; None if it holds values without a JSON form, such as YAML's dates."""
    try:
        return json.dumps(dict(mapping))
    except TypeError:
        return None


def option(default: Any, help: str, *, kind: Kind | None = None, **details: Any) -> Any:
    """Declares a dataclass field as an option. kind: its kind, if the field's type does not imply it.

    details: fields of `Option`, and `prefix`, which precedes the field's name in the option's name.
    """
    return dataclasses.field(
        default=default, metadata={_METADATA: {"help": help, "kind": kind, **details}}
    )


def options_of(*tables: type, nested: bool = True) -> tuple[Option, ...]:
    """Returns every option of these classes. nested: include configuration classes among their fields."""
    found: list[Option] = []
    for table in tables:
        types = typing.get_type_hints(table)
        for field in dataclasses.fields(table):
            if nested and dataclasses.is_dataclass(types[field.name]):
                found += options_of(types[field.name])
            elif _METADATA in field.metadata:
                found.append(_option(field, types[field.name]))
    return tuple(found)


def _option(field: dataclasses.Field[Any], type_: object) -> Option:
    details = dict(field.metadata[_METADATA])
    kind = details.pop("kind") or _KINDS[_without_none(type_)]
    name = details.pop("prefix", "") + details.pop("name", field.name)
    default: Any = field.default
    return Option(name, field.name, kind, default, **details)


def _without_none(type_: object) -> object:
    parts = [part for part in typing.get_args(type_) if part is not type(None)]
    is_optional = type(None) in typing.get_args(type_)
    return parts[0] if is_optional and len(parts) == 1 else type_


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")
