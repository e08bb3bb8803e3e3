"""Which modules a `quantization_config` names: patterns, groups, and exceptions of GPTQ."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from kvant.models.geometry.fields import Fields

T = TypeVar("T")
Chosen = Callable[[str], bool]
"""A test for a module's path."""

_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip
"""The name of the product that engines make of several, which some checkpoints list instead."""


def names_chosen(patterns: Sequence[str]) -> Chosen:
    """Returns a test for module names: patterns are "re:..", wildcards, whole names, or parts of names.

    A pattern with the name of a fused product means its parts too.
    """
    fused = [pattern for pattern in patterns if any(one in pattern for one in _FUSED.values())]
    of_parts = _names_chosen(fused)
    chosen = _names_chosen(patterns)
    if not fused:
        return chosen

    def either(name: str) -> bool:
        path, _, last = name.rpartition(".")
        return chosen(name) or (last in _FUSED and of_parts(f"{path}.{_FUSED[last]}"))

    return either


OF_TRANSFORMERS = ("modules_to_not_convert", "ignored_layers")
"""Fields that list the layers that FP8 and AWQ leave alone. AutoFP8 writes the second."""


def names_left_alone(fields: Fields, lists: Sequence[str]) -> Chosen:
    """Returns a test for the head, and for the names that any of these fields lists.

    In fields of transformers, its rule holds too. AutoAWQ lists parts of names, which that rule misses.
    """
    listed = [name for field in lists for name in fields.words(field) or ()]
    chosen = names_chosen(("lm_head", *listed))
    if not set(lists) <= set(OF_TRANSFORMERS):
        return chosen
    skipped = _not_converted(listed)
    return lambda name: chosen(name) or skipped(name)


def _not_converted(patterns: Sequence[str]) -> Chosen:
    """Returns transformers' test for modules that it does not convert.

    A pattern is the end of a name, or a regular expression for its beginning, which ends before a dot.
    """
    begins = []
    for pattern in patterns:
        with suppress(re.error):  # a wildcard
            begins.append(re.compile(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"))
    ends = tuple(patterns)
    return lambda name: name.endswith(ends) or any(one.match(name) for one in begins)


def _names_chosen(patterns: Sequence[str]) -> Chosen:
    regexes = [re.compile(pattern[3:]) for pattern in patterns if pattern.startswith("re:")]
    plain = [pattern for pattern in patterns if not pattern.startswith("re:")]

    def chosen(name: str) -> bool:
        if any(regex.match(name) for regex in regexes):
            return True
        return any(
            name == pattern
            or f".{pattern}." in f".{name}."
            or ("*" in pattern and fnmatch.fnmatchcase(name, pattern))
            for pattern in plain
        )

    return chosen


def by_precedence(
    groups: Sequence[tuple[Sequence[str], T]],
) -> tuple[tuple[Chosen | None, T], ...]:
    """Orders compressed-tensors' groups, (targets, value), so that the first that chooses a module decides.

    Names come before patterns, and patterns before "Linear", for which the test is None. Patterns are in the
    order of their texts. A target of several groups belongs to the last of them.
    """
    owners = {target: value for targets, value in groups for target in targets}
    found: list[tuple[Chosen | None, T]] = []
    for targets, value in groups:
        plain = [one for one in targets if not one.startswith("re:") and one != "Linear"]
        found.append((names_chosen([one for one in plain if owners[one] is value]), value))
    patterns = sorted(target for target in owners if target.startswith("re:"))
    found += [(names_chosen((pattern,)), owners[pattern]) for pattern in patterns]
    if "Linear" in owners:
        found.append((None, owners["Linear"]))
    return tuple(found)


def exceptions(fields: Fields) -> Iterator[tuple[Chosen, Fields | None]]:
    """Yields GPTQ's `dynamic`: tests for modules, and their own fields; None: they are not quantised.

    The first that matches a module decides.
    """
    dynamic = fields.inside("dynamic")
    for pattern in () if dynamic is None else dynamic.names():
        assert dynamic is not None
        regex = re.compile(pattern[2:] if pattern.startswith(("-:", "+:")) else pattern)
        own = dynamic.inside(pattern) or Fields({})
        yield _matches(regex), None if pattern.startswith("-:") else own.over(fields)


def _matches(regex: re.Pattern[str]) -> Chosen:
    return lambda name: regex.match(name) is not None


def gptq_left_alone(fields: Fields) -> Chosen:
    """Returns a test for modules that GPTQ does not quantise: the head, exceptions, and names not listed."""
    rules, has_head = tuple(exceptions(fields)), fields.flag("lm_head", False)
    inside = fields.lists_of_words("modules_in_block_to_quantize")

    def left_alone(name: str) -> bool:
        for chosen, own in rules:
            if chosen(name):
                return own is None
        if name == "lm_head" or name.endswith(".lm_head"):
            return not has_head
        return inside is not None and not any(f".{name}".endswith(f".{one}") for one in inside)

    return left_alone
