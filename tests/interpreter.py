"""Triton's interpreter, without work whose result it drops or has already.

- Each call of a device function replaces every builtin of `triton.language`, as the launch around it has
  already done. One replacement for each launch and for each set of modules that a function sees is enough.
- Each sum and product of integers is computed a second time in int64. An assertion compares the two, and
  `InterpreterOptions.debug` is off, so the assertion is never made.
- Each value builds a table of numpy's types and a tuple of its shape.

It also multiplies bfloat16: Triton's interpreter, which numpy gives no such type, multiplies its bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
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

_builder = interpreter.interpreter_builder
assert not _builder.options.debug, "assertions are made: an overflow of integers would be found"
_builder.options = replace(_builder.options, sanitize_overflow=False)

_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype[Any]] = {}
"""By the name of a scalar type."""


def _np_dtype_once(kind: language.dtype) -> np.dtype[Any]:
    scalar = kind.element_ty if isinstance(kind, language.block_type) else kind
    found = _np_dtypes.get(scalar.name)
    if found is None:
        found = _np_dtypes[scalar.name] = _np_dtype(scalar)
    return found


interpreter._get_np_dtype = _np_dtype_once


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[language.constexpr, language.tuple]:
    """The number of elements, and the sizes as the language has them."""
    sample = language.block_type(language.int32, sizes) if sizes else language.int32
    made = language.tensor.__new__(language.tensor)
    _make_tensor(made, None, sample)
    return made.numel, made.shape


def _make_tensor_once(value: language.tensor, handle: Any, kind: language.dtype) -> None:
    value.handle, value.type, value.dtype = handle, kind, kind.scalar
    value.numel, value.shape = _shape(kind.shape if kind.is_block() else ())


_make_tensor = language.tensor.__init__
language.tensor.__init__ = _make_tensor_once


def _dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
    a, b = (
        interpreter.TensorHandle(
            (x.data.astype(np.uint32) << 16).view(np.float32), language.float32
        )
        if x.dtype.scalar == language.bfloat16
        else x
        for x in (a, b)
    )
    return _product(builder, a, b, *others)


_product = interpreter.InterpreterBuilder.create_dot
interpreter.InterpreterBuilder.create_dot = _dot
