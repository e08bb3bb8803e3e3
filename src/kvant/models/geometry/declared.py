"""Reads which values transformers' config classes take, and their defaults, without importing transformers.

A start gives config.json to such a class, which refuses values of other kinds and ranges than it declares.
The source of the installed class says them, and parsing one file takes a few milliseconds.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvant.models.geometry.fields import Fields, shown

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

_MISSING_ALONE = ("head_dim",)
"""Fields that some classes do not declare, and that their modules compute if they are missing."""

_ACTIVATIONS = ("hidden_act", "hidden_activation")


def refuse_undeclared(fields: Fields, model_type: str) -> None:
    """Raises BadCheckpoint for the first value that the class of `model_type` does not take.

    Checks nothing where transformers is not installed, or has no such class.
    """
    taken, declared = declared_kinds(model_type), _declared(model_type)
    if not taken:
        return
    for name, kinds in taken.items():
        if name not in fields.names():
            continue
        value = fields.given(name)
        if not any(_is_kind(value, kind) for kind in kinds):
            words = dict.fromkeys(_KINDS[kind][1] for kind in kinds)
            raise fields.bad(name, f"transformers takes {' or '.join(words)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise fields.bad(name, "it must be a number")
    for name in _MISSING_ALONE:
        if fields.is_null(name) and name not in taken:
            raise fields.bad(name, "transformers has a default for a missing one alone")
    for name, (least, most) in declared.ranges.items():
        value = fields.given(name)
        if isinstance(value, int | float) and not least <= value <= most:
            raise fields.bad(name, f"transformers takes numbers from {least} to {most}")
    for name, allowed in declared.choices.items():
        if name in fields.names() and fields.given(name) not in allowed:
            raise fields.bad(name, f"transformers takes {', '.join(map(shown, allowed))}")
    for name in _ACTIVATIONS:
        known = activations()
        if known and isinstance(value := fields.given(name), str) and value not in known:
            raise fields.bad(name, f"transformers' activations are {', '.join(known)}")


def declared_kinds(model_type: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the kinds of each field whose annotation has no others, by the field's name."""
    return _declared(model_type).kinds


def type_of_section(name: str, model_type: str) -> str:
    """Returns the model_type of a section of a config that does not say it."""
    usual = f"{model_type}_{name.removesuffix('_config')}"
    return _declared(model_type).sections.get(name, usual)


def left_out(given: Iterable[str], model_type: str) -> Mapping[str, Any]:
    """Returns what the class takes for the fields that a config leaves out. given: names of its fields."""
    made, present = _declared(model_type), set(given)
    for pair in made.same.items():
        if not present.isdisjoint(pair):
            present.update(pair)
    return {name: value for name, value in made.defaults.items() if name not in present}


@cache
def activations() -> tuple[str, ...]:
    """Returns the names of transformers' activations; none where it is not installed."""
    for place in _places():
        for line in ast.parse(Path(place, "activations.py").read_text(encoding="utf-8")).body:
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "ACT2CLS":
                assert isinstance(line.value, ast.Dict)
                return tuple(ast.literal_eval(key) for key in line.value.keys if key is not None)
    return ()


@dataclass(frozen=True, slots=True)
class _Declared:
    kinds: Mapping[str, tuple[str, ...]]
    ranges: Mapping[str, tuple[float, float]]
    defaults: Mapping[str, Any]
    same: Mapping[str, str]  # pairs of names of one field
    sections: Mapping[str, str]
    choices: Mapping[str, tuple[Any, ...]]


@cache
def _declared(model_type: str) -> _Declared:
    kinds: dict[str, tuple[str, ...]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    defaults: dict[str, Any] = {}
    same: dict[str, str] = {}
    sections: dict[str, str] = {}
    choices: dict[str, tuple[Any, ...]] = {}
    made = _class_of(model_type)
    for line in () if made is None else made.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Dict):
            if (target := ast.unparse(line.targets[0])) == "attribute_map":
                same = ast.literal_eval(line.value)
            elif target == "sub_configs_defaults":
                sections = dict(_sections(line.value))
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        name, value = line.target.id, line.value
        # A value of JSON is never an object of a class.
        found = tuple(kind for kind in _names(line.annotation) if not kind.endswith("Config"))
        if (words := _literals(line.annotation)) is not None:
            choices[name] = words
        if found and all(kind in _KINDS for kind in found):
            kinds[name] = found
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Call):
            if ast.unparse(value.func.func) == "interval":
                ends = {end.arg: ast.literal_eval(end.value) for end in value.func.keywords}
                ranges[name] = ends.get("min", -math.inf), ends.get("max", math.inf)
            value = next((one.value for one in value.keywords if one.arg == "default"), None)
        if isinstance(value, ast.Constant) and isinstance(value.value, bool | int | float | str):
            defaults[name] = value.value
    return _Declared(kinds, ranges, defaults, same, sections, choices)


def _sections(made: ast.Dict) -> Iterator[tuple[str, str]]:
    """Yields the sections of a config of a type that is given in words."""
    for key, value in zip(made.keys, made.values, strict=True):
        for word in value.keywords if isinstance(value, ast.Call) else ():
            if word.arg == "model_type" and key is not None:
                yield ast.literal_eval(key), ast.literal_eval(word.value)


def _places() -> list[str]:
    package = find_spec("transformers")
    return [] if package is None else list(package.submodule_search_locations or ())


def _class_of(model_type: str) -> ast.ClassDef | None:
    for place in _places():
        folder = model_type
        while folder:
            path = Path(place, "models", folder, f"configuration_{folder}.py")
            if folder.isidentifier() and path.is_file():
                for one in ast.parse(path.read_text(encoding="utf-8")).body:
                    if isinstance(one, ast.ClassDef) and _says(one, model_type):
                        return one
            folder = folder.rpartition("_")[0]
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


def _literals(annotation: ast.expr) -> tuple[Any, ...] | None:
    """Returns the values of an annotation of literals, None for another one."""
    if isinstance(annotation, ast.BinOp):
        left, right = _literals(annotation.left), _literals(annotation.right)
        return None if left is None or right is None else (*left, *right)
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return (None,)
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "Literal":
        return None
    found = ast.literal_eval(annotation.slice)
    return found if isinstance(found, tuple) else (found,)


def _is_kind(value: Any, kind: str) -> bool:
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is_kind(one, kind[5:-1]) for one in value)
    return isinstance(value, _KINDS[kind][0]) and (kind != "int" or type(value) is not bool)
