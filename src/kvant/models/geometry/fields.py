"""Reads an unchecked config.json: returns a value of the right kind, or raises BadCheckpoint.

`null` and a missing key are the same thing here; `kvant.models.geometry.declared` refuses `null` where
transformers does. A message names the field, with the section it stands in, and the value that was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG

MAX_WIDTH = 2**24
"""More than any width, head count or vocabulary of a model. Larger numbers are refused as absurd."""

MAX_LAYERS = 4096
MAX_TOKENS = 2**40

_SHOWN = 80  # characters of a bad value that a message repeats


class MissingField(BadCheckpoint):
    """A number that planning needs is missing."""


class Fields:
    """One section of a config. `section` is "" at the top and "text_config." inside one."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        section: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._values = values
        self._section = section
        self._defaults = defaults or {}

    def raw(self, name: str) -> Any:
        """Returns the unchecked value, else the family's default, else None."""
        value = self._values.get(name)
        return self._defaults.get(name) if value is None else value

    def given(self, name: str) -> Any:
        """Returns the unchecked value without defaults: None for `null` and for a missing key."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return self.raw(name) is not None

    def is_null(self, name: str) -> bool:
        """Returns whether the value is `null`, for families that distinguish it from a missing key."""
        return name in self._values and self._values[name] is None

    def bad(self, name: str, why: str) -> BadCheckpoint:
        """Returns the error to raise about one field."""
        value = self._values.get(name)
        missing = "is null" if self.is_null(name) else "is missing"
        what = missing if value is None else f"is {shown(value)}"
        return BadCheckpoint(
            f"config.json: {self._section}{name} {what}",
            why=why,
            ways_out=(COMPARE_CONFIG,),
        )

    def integer(self, *names: str, least: int = 1, most: int = MAX_WIDTH) -> int:
        """Returns a whole number. Several names spell one field: the first that is present counts."""
        value = self.optional_integer(*names, least=least, most=most)
        if value is None:
            null = next((name for name in names if self.is_null(name)), None)
            bad = self.bad(null or names[0], "a model cannot be planned without it")
            if null is not None:
                raise bad
            raise MissingField(bad.what, why=bad.why, ways_out=bad.ways_out)
        return value

    def optional_integer(self, *names: str, least: int = 1, most: int = MAX_WIDTH) -> int | None:
        for name in names:
            value = self.raw(name)
            if value is None:
                continue
            # bool is an int in Python, but `true` in a config is not a number.
            if type(value) is not int or not least <= value <= most:
                raise self.bad(name, f"it must be a whole number from {least} to {most}")
            return value
        return None

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not -1e30 < value < 1e30 or not math.isfinite(value):
            raise self.bad(name, "it must be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.bad(name, "it must be true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.bad(name, "it must be a text")
        return value

    def words(self, name: str) -> tuple[str, ...] | None:
        """Returns a list of texts, or None if it is missing."""
        value = self.raw(name)
        if value is None:
            return None
        if not _is_list(value) or not all(isinstance(word, str) for word in value):
            raise self.bad(name, "it must be a list of texts")
        return tuple(value)

    def lists_of_words(self, name: str) -> tuple[str, ...] | None:
        """Returns the texts of a list that holds lists of texts, or texts; None if it is missing."""
        value = self.raw(name)
        if value is None:
            return None
        flat = (
            [word for one in value for word in (one if _is_list(one) else (one,))]
            if _is_list(value)
            else (None,)
        )
        if not all(isinstance(word, str) for word in flat):
            raise self.bad(name, "it must be a list of lists of texts")
        return tuple(flat)

    def integers(
        self, name: str, *, least: int = 0, most: int = MAX_WIDTH
    ) -> tuple[int, ...] | None:
        """Returns a list of whole numbers, or None if it is missing."""
        value = self.raw(name)
        if value is None:
            return None
        if not _is_list(value) or not all(type(n) is int and least <= n <= most for n in value):
            raise self.bad(name, f"it must be a list of whole numbers from {least} to {most}")
        return tuple(value)

    def inside(self, name: str, defaults: Mapping[str, Any] | None = None) -> Fields | None:
        """Returns a nested section, or None if it is missing."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad(name, "it must be an object")
        return Fields(value, section=f"{self._section}{name}.", defaults=defaults)

    def completed(self, missing: Mapping[str, Any]) -> Fields:
        """Returns the section with values for fields that are missing; `null` stays."""
        return Fields({**missing, **self._values}, section=self._section, defaults=self._defaults)

    def over(self, base: Fields) -> Fields:
        """Returns the section with the values of another one for fields that are missing."""
        return self.completed(base._values)

    def names(self) -> tuple[str, ...]:
        """Returns the section's own keys, in order."""
        return tuple(str(name) for name in self._values)


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the section of a config.json with the decoder's fields, for any family."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def shown(value: Any) -> str:
    """Returns a value as a shortened text for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}.."


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
