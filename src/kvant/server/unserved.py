"""Fields of a body that its types do not have, also inside its objects: refused by name, or logged once."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from kvant.server.api_error import bad_request, shown
from kvant.server.parameters import INSIDE, Inside, Refused, Table

_MOST_IGNORED = 100
_log = logging.getLogger(__name__)
_ignored: set[str] = set()


def refuse_unserved(raw: Mapping[str, Any], known: type[msgspec.Struct], table: Table) -> None:
    """Raises ApiError 400 for a field of the body, or of an object in it, that is refused or unknown.

    Objects that clients send back as a server gave them may have unknown fields, which are logged once.
    """
    for name in sorted(_refuse(_extra(raw, known), table.refused)):
        if name not in table.no_effect:
            raise bad_request(f"{shown(name)}: this endpoint has no such parameter", shown(name))
    for name, kind in objects_of(known).items():
        if name in raw:
            for found in _objects(raw[name], kind, name):
                _check(*found)


def _check(given: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    """Raises ApiError 400 for a refused or unknown field of one object. where: its path in the body."""
    extra = _extra(given, kind)
    if not extra:
        return
    table = INSIDE.get(kind.__name__, Inside())
    if table.types is not None and given.get("type") not in table.types:
        return  # its type is refused, with a better message
    unknown = [
        name
        for name in sorted(_refuse(extra, table.refused, where=f"{where}."))
        if name not in table.no_effect
    ]
    if table.is_history:
        place = re.sub(r"\[\d+\]", "[]", where)
        note_ignored(f"{place}.{name}" for name in unknown)
    elif unknown:
        has = ", ".join(sorted(kind.__struct_fields__))
        name = f"{where}.{shown(unknown[0])}"
        raise bad_request(f"{name}: there is no such field; known here: {has}", name)


def _objects(
    given: object, kind: type[msgspec.Struct], where: str
) -> Iterator[tuple[dict[str, Any], type[msgspec.Struct], str]]:
    """Yields the objects of a type in a value, and the objects within them, with their paths."""
    if isinstance(given, list):
        for place, one in enumerate(given):
            yield from _objects(one, kind, f"{where}[{place}]")
    elif isinstance(given, dict):
        yield given, kind, where
        for name, inner in objects_of(kind).items():
            if name in given:
                yield from _objects(given[name], inner, f"{where}.{name}")


@functools.cache
def objects_of(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Returns the fields of a type that hold objects with fields of their own, or lists of them."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    objects = {field.encode_name: _object(field.type) for field in found.fields}
    return {name: inner for name, inner in objects.items() if inner is not None}


def objects_within(kind: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    """Returns the types of all objects in a body, at any depth."""
    found: set[type[msgspec.Struct]] = set()
    waiting = [kind]
    while waiting:
        new = set(objects_of(waiting.pop()).values()) - found
        found |= new
        waiting += new
    return found


def _object(kind: inspect.Type) -> type[msgspec.Struct] | None:
    if isinstance(kind, inspect.Metadata):
        return _object(kind.type)
    if isinstance(kind, inspect.UnionType):
        return next((found for one in kind.types if (found := _object(one)) is not None), None)
    if isinstance(kind, inspect.ListType):
        return _object(kind.item_type)
    return kind.cls if isinstance(kind, inspect.StructType) else None


def note_ignored(names: Iterable[str]) -> None:
    """Logs each ignored name once. Clients choose the names, so the number of lines is bounded."""
    for name in map(shown, names):
        if name not in _ignored and len(_ignored) < _MOST_IGNORED:
            _ignored.add(name)
            _log.warning("requests set %s, which has no effect here", ascii(name))


def _refuse(
    extra: Mapping[str, object], refused: Mapping[str, Refused], *, where: str = ""
) -> list[str]:
    """Raises ApiError 400 for a refused field with a value that is not neutral. Returns unknown names."""
    unknown = []
    for name, value in extra.items():
        if name not in refused:
            unknown.append(name)
        elif value is not None and not refused[name].is_neutral(value):
            way_out = refused[name].way_out and f": {refused[name].way_out}"
            raise bad_request(
                f"{where}{name} is not offered by this server{way_out}", f"{where}{name}"
            )
    return unknown


def _extra(raw: Mapping[str, Any], known: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: raw[name] for name in raw.keys() - _fields(known)}


@functools.cache
def _fields(known: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(known.__struct_fields__)
