"""Reads which kinds of values transformers' config classes take, without importing transformers.

A start gives config.json to such a class, which refuses values of other kinds than it declares. The source
of the installed class says them, and parsing one file takes a few milliseconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvant.models.geometry.fields import Fields

_KINDS: Mapping[str, tuple[type, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a text"),
    "list": (list, "a list"),
    "list[float]": (list, "a list of numbers"),
    "list[int]": (list, "a list of whole numbers"),
    "list[str]": (list, "a list of texts"),
    "tuple": (list, "a list"),
    "dict": (dict, "an object"),
    "None": (type(None), "null"),
}
"""Python's type of a JSON value, and its name in messages, by the name in an annotation."""


def refuse_undeclared_kinds(fields: Fields, model_type: str) -> None:
    """Raises BadCheckpoint for the first value of a kind that the class of `model_type` does not take.

    Checks nothing where transformers is not installed, or has no such class.
    """
    for name, kinds in declared_kinds(model_type).items():
        if name not in fields.names():
            continue
        value = fields.given(name)
        if not any(_is_kind(value, kind) for kind in kinds):
            words = dict.fromkeys(_KINDS[kind][1] for kind in kinds)
            raise fields.bad(name, f"transformers takes {' or '.join(words)}")


@cache
def declared_kinds(model_type: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the kinds of each field whose annotation has no others, by the field's name."""
    made = _class_of(model_type)
    if made is None:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for line in made.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            kinds = tuple(_names(line.annotation))
            if all(kind in _KINDS for kind in kinds):
                found[line.target.id] = kinds
    return found


def _class_of(model_type: str) -> ast.ClassDef | None:
    package = find_spec("transformers")
    places = () if package is None else package.submodule_search_locations or ()
    for place in places:
        for folder in (model_type, model_type.removesuffix("_text")):
            path = Path(place, "models", folder, f"configuration_{folder}.py")
            if not folder.isidentifier() or not path.is_file():
                continue
            for one in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(one, ast.ClassDef) and _says(one, model_type):
                    return one
    return None


def _says(made: ast.ClassDef, model_type: str) -> bool:
    return any(
        isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and line.targets[0].id == "model_type"
        and isinstance(line.value, ast.Constant)
        and line.value.value == model_type
        for line in made.body
    )


def _names(annotation: ast.expr) -> Iterator[str]:
    """Yields the names of an annotation's alternatives; "" for what is no plain name."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        yield from _names(annotation.left)
        yield from _names(annotation.right)
    elif isinstance(annotation, ast.Subscript):
        whole = ast.unparse(annotation)
        yield from [whole] if whole in _KINDS else _names(annotation.value)
    elif isinstance(annotation, ast.Constant) and annotation.value is None:
        yield "None"
    else:
        yield annotation.id if isinstance(annotation, ast.Name) else ""


def _is_kind(value: Any, kind: str) -> bool:
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is_kind(one, kind[5:-1]) for one in value)
    return isinstance(value, _KINDS[kind][0]) and (kind != "int" or type(value) is not bool)
