"""Triton's interpreter, without the two fifths of its time that it spends patching its language again.

Each call of a device function replaces every builtin of `triton.language`, although the launch around it has
done so already. One replacement for each launch and for each set of modules that a function sees is enough.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from triton import language
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_patched: set[tuple[bool, bool]] = set()
"""What the running launch has patched: whether functions see `triton.language`, and its `core`."""


class _Scope(interpreter._LangPatchScope):
    """What a launch replaced."""

    def restore(self) -> None:
        _patched.clear()
        super().restore()


def _patch_once(function: FunctionType) -> Any:
    values = function.__globals__.values()
    seen = (
        any(value is language for value in values),
        any(value is language.core for value in values),
    )
    if seen in _patched:
        return interpreter._LangPatchScope()
    is_launch = not _patched
    _patched.add(seen)
    scope = _patch(function)
    if is_launch:
        scope.__class__ = _Scope
    return scope


interpreter._patch_lang = _patch_once
