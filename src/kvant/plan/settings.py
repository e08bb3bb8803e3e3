"""Reads the values of options with their sources: argument or flag, else variable, else YAML, else default.

Sources are read once. Values are never merged: the strongest source wins, and overridden values stay
visible. Unknown keys and variables are errors.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kvant.errors import BadValue, ConfigError, UnknownName, WayOut
from kvant.plan.options import PREFIX, Option, Value, options_of

CONFIG_VARIABLE = PREFIX + "CONFIG"
OTHER_VARIABLES = (CONFIG_VARIABLE, PREFIX + "CACHE")
"""Variables that are not options: the configuration file, and the directory of converted models."""

# Kubernetes sets these in every container beside a service named "kvant". It also sets KVANT_PORT to
# tcp://..., which is refused with the reason.
_SERVICE_LINK = re.compile(
    PREFIX + r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Given:
    """A value and its source: "--max-num-seqs", "KVANT_MAX_NUM_SEQS", "kvant.yaml:3: max_num_seqs"."""

    value: Value
    by: str

    def label(self, item: object) -> str:
        """Returns `item` with its source, for messages: "--kv-cache-dtype fp8", "kv_cache_dtype='fp8'"."""
        return f"{self.by}{item!r}" if self.by.endswith("=") else f"{self.by} {item}"


@dataclass(frozen=True, slots=True)
class Settings:
    """All given values by option, strongest first. An option without an entry has its default."""

    given: dict[str, tuple[Given, ...]] = field(default_factory=dict)

    def get(self, name: str) -> Given | None:
        """Returns an option's effective value, from its strongest source; None if it has its default."""
        found = self.given.get(name)
        return found[0] if found else None

    def only(self, options: Iterable[Option]) -> Settings:
        """Returns the settings of these options only."""
        names = {option.name for option in options}
        return Settings({name: found for name, found in self.given.items() if name in names})

    def build(self, table: type[T]) -> T:
        """Returns an instance of a configuration class, from the given values and its own defaults."""
        made: dict[str, Any] = {
            name: self.build(type_)
            for name, type_ in typing.get_type_hints(table).items()
            if isinstance(type_, type) and dataclasses.is_dataclass(type_)
        }
        for option in options_of(table, nested=False):
            found = self.get(option.name)
            if found is not None:
                made[option.field] = found.value
        return table(**made)


def read_settings(
    known: Iterable[Option],
    *,
    given: Mapping[str, object],
    by: Callable[[Option], str],
    environ: Mapping[str, str],
    file: Path | None = None,
) -> Settings:
    """Reads all sources. Raises ConfigError, naming the variable or the file and line of a wrong value.

    given: flags or arguments by option name; None means absent. by: returns how messages name an option.
    """
    known = tuple(known)
    ladder = (
        _given(known, given, by),
        _from_environment(known, environ),
        {} if file is None else _from_file(known, file),
    )
    every = {o.name: tuple(step[o.name] for step in ladder if o.name in step) for o in known}
    return Settings({name: found for name, found in every.items() if found})


def refuse_unknown_variables(known: Iterable[Option], environ: Mapping[str, str]) -> None:
    """Raises UnknownName for the first unknown KVANT_ variable."""
    names = [*(option.variable for option in known), *OTHER_VARIABLES]
    aliases = {PREFIX + alias.upper() for option in known for alias in option.aliases}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in names or name in aliases:
            continue
        if not _SERVICE_LINK.fullmatch(name):
            raise UnknownName("variable", name, names, asked_by="the environment")


def _given(
    known: Iterable[Option], given: Mapping[str, object], by: Callable[[Option], str]
) -> dict[str, Given]:
    found: dict[str, Given] = {}
    options = {name: option for option in known for name in option.names}
    for name, raw in given.items():
        if raw is None:
            continue
        if name not in options:
            raise UnknownName("argument", name, _shown(known))
        option = options[name]
        value = option.read(raw, by(option).removesuffix("="))
        if option.name in found and found[option.name].value != value:
            raise BadValue(
                f"{' and '.join(option.names)} differ", why="they are names of one option"
            )
        found[option.name] = Given(value, by(option))
    return found


def _from_environment(known: Iterable[Option], environ: Mapping[str, str]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for option in known:
        for name in option.names:
            variable = PREFIX + name.upper()
            text = environ.get(variable)
            if text is None:
                continue
            if variable == PREFIX + "PORT" and "://" in text:
                raise BadValue(
                    f"{variable} is {text!r}",
                    why="Kubernetes sets it to that beside a service named kvant",
                    ways_out=(WayOut("set enableServiceLinks: false in the pod's specification"),),
                )
            if option.name in found:
                raise BadValue(f"{found[option.name].by} and {variable} are names of one option")
            found[option.name] = Given(option.read_text(text, variable), variable)
    return found


def _from_file(known: Iterable[Option], path: Path) -> dict[str, Given]:
    """Reads a flat YAML mapping. Dashes and underscores in keys are equal; null means no value."""
    options = {name: option for option in known for name in option.names}
    found: dict[str, Given] = {}
    seen: set[str] = set()
    faults: list[str] = []
    unknown: UnknownName | None = None
    for key, line, raw in _entries(path):
        name = key.replace("-", "_")
        if name not in options:
            unknown = UnknownName("key", key, _shown(known), asked_by=f"{path}:{line}")
            faults.append(unknown.what)
            continue
        option = options[name]
        by = f"{path}:{line}: {option.name}"
        if option.name in seen:
            faults.append(f"{by} is given twice")
        elif raw is not None:
            try:
                found[option.name] = Given(option.read(raw, by), by)
            except ConfigError as fault:
                faults.append(f"{fault.what}; {fault.why}")
        seen.add(option.name)
    if unknown is not None and len(faults) == 1:
        raise unknown  # its message lists all keys
    if faults:
        raise BadValue("\n".join(faults), why=f"{path} is checked before anything starts")
    return found


def _shown(known: Iterable[Option]) -> list[str]:
    return [name for option in known if not option.hidden for name in option.names]


def _entries(path: Path) -> list[tuple[str, int, object]]:
    """Returns (key, line, value) of each entry of a YAML mapping. Raises BadValue for other files."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise BadValue(
                f"{path}:{root.start_mark.line + 1} is not a mapping",
                why="write lines of KEY: VALUE",
            )
        loader = yaml.SafeLoader("")
        return [
            (
                str(key.value),
                key.start_mark.line + 1,
                loader.construct_object(value, deep=True),
            )
            for key, value in root.value
        ]
    except OSError as fault:
        raise BadValue(
            f"the configuration file {path} cannot be read", why=str(fault.strerror or fault)
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as fault:
        mark = getattr(fault, "problem_mark", None)
        place = str(path) if mark is None else f"{path}:{mark.line + 1}"
        raise BadValue(
            f"{place} is not YAML", why=str(getattr(fault, "problem", None) or fault)
        ) from None
