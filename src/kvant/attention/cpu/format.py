"""A KV format as the CPU kernels take it: facts of its declaration and functions of its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

from kvant.attention.cpu.formats import SERVED
from kvant.attention.cpu.layout import Scaling
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Encoding, Granularity, KVFormat, Rotation, ScalePlace, ZeroPoint


@dataclass(frozen=True, slots=True)
class Codes:
    """How one encoding becomes float32 lanes: functions that emit LLVM instructions.

    unpack(context, b, words): decodes `group` words of 16 rows, one row per lane, into FLOATS of their
        numbers, in order. For keys: 16 keys of one dimension at a time, so dot products need no sum over
        lanes. Scales are not applied.
    chunk(context, b, address, vectors): decodes 16 or 32 (vectors 1 or 2) neighbouring numbers of one
        row. For values. For 4 bits, the even ones of 32 numbers come first.
    group: words that are unpacked together. marks_nan: a code can be NaN, as in e4m3, without the row's
        scale being NaN. in_blocks: numbers are multiplied by scales of blocks of 16.
    """

    bits: int
    unpack: Callable[[Any, Any, list[Any]], list[Any]]
    chunk: Callable[[Any, Any, Any, int], list[Any]]
    group: int = 1
    marks_nan: bool = False
    in_blocks: bool = False


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a format's file provides.

    codes: shared by all formats of one encoding. write(row, _): stores one row, for numba; row: address of
    the fields of `layout.Row`. factor: number = decoded * factor.
    """

    codes: Codes
    write: Callable[[int, int], None]
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Format:
    """A format as kernels take it; other fields as in `Kernels`.

    number: identifies the encoding in compiled code; see `codes_of`. rotated: rows are stored rotated.
    """

    number: int
    codes: Codes
    write: Callable[[int, int], None]
    factor: float
    scaling: Scaling
    rotated: bool


class _FormatModule(Protocol):
    def kernels(self, declared: KVFormat) -> Kernels: ...


_ENCODINGS = tuple(Encoding)


@cache
def format_of(dtype: KVDtype) -> Format:
    """Returns the format for kernels; its file is imported on first use."""
    declared = dtype.format
    name = f"kvant.attention.cpu.formats.{declared.codec}"
    given = cast(_FormatModule, import_module(name)).kernels(declared)
    return Format(
        number=_ENCODINGS.index(declared.encoding),
        codes=given.codes,
        write=given.write,
        factor=given.factor,
        scaling=_scaling(declared),
        rotated=declared.rotation is Rotation.HADAMARD,
    )


@cache
def codes_of(number: int) -> Codes:
    """Returns the codes of an encoding by its number, since compile-time arguments of numba are numbers."""
    encoding = _ENCODINGS[number]
    return next(format_of(dtype).codes for dtype in SERVED if dtype.format.encoding is encoding)


def _scaling(declared: KVFormat) -> Scaling:
    if declared.scale_place is not ScalePlace.PLANE:
        return Scaling.NONE
    if declared.granularity is Granularity.BLOCK:
        return Scaling.BLOCK
    if declared.zero_point is ZeroPoint.SCALE_MANTISSA:
        return Scaling.ROW_ZERO_POINT
    if declared.zero_point is ZeroPoint.BELOW_SCALE:
        return Scaling.ROW_SHORT
    if declared.scale_encoding is Encoding.FLOAT32:
        return Scaling.ROW
    return Scaling.ROW_HALF if declared.symmetric else Scaling.ROW_HALF_OFFSET
