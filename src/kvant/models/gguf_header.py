"""Reads the header of a GGUF file: metadata and the table of tensors, every length checked first.

The file may be truncated, hostile, or not GGUF at all. So every length is compared with the file's
size before anything is read, looped over or allocated. Specification: ggml's
docs/gguf.md, versions 2 and 3. Little-endian only.

    magic "GGUF" | version u32 | tensors u64 | pairs u64 | pairs.. | tensor table.. | padding | data
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvant.errors import BadCheckpoint, WayOut

_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_TENSOR_ELEMENTS = 1 << 40
_DEFAULT_ALIGNMENT = 32


class _Value(IntEnum):
    """The metadata value types, as numbered by the specification."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


_SCALAR_CODE = {
    _Value.U8: "B",
    _Value.I8: "b",
    _Value.U16: "H",
    _Value.I16: "h",
    _Value.U32: "I",
    _Value.I32: "i",
    _Value.F32: "f",
    _Value.BOOL: "?",
    _Value.U64: "Q",
    _Value.I64: "q",
    _Value.F64: "d",
}

Scalar = bool | int | float | str
MetadataValue = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the file.

    shape: outermost dimension first, as in torch and numpy (the file has the reverse order).
    start, nbytes: the range of its bytes, from the beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything in a GGUF file except tensor data. header_bytes: bytes read from the file."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GGUFTensor]
    header_bytes: int


def read_header(path: Path) -> GGUFHeader:
    """Reads the header of `path`. Raises BadCheckpoint, naming the file and its fault."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise malformed(path, "the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).header()
    except OSError as error:
        raise BadCheckpoint(f"cannot read {path}", why=str(error)) from error


def malformed(path: Path, why: str) -> BadCheckpoint:
    """Returns the error for a file that is not GGUF, or a broken one."""
    return BadCheckpoint(
        f"cannot read {path} as GGUF",
        why=why,
        ways_out=[WayOut("fetch the file again and compare its size with the source's")],
    )


def _impostor(start: bytes) -> str | None:
    """Describes the other kind of file that a failed download left under the model's name, or None."""
    text = start.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself (`git lfs pull` in its repository)"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page: the download got an error or login page instead of the file"
    return None


class _Reader:
    """A cursor over the mapped file that refuses to step outside of it."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._at = 0

    def header(self) -> GGUFHeader:
        self._check_magic()
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise malformed(self._path, self._version_reason(int(version)))
        tensor_count, pair_count = int(self._scalar("Q")), int(self._scalar("Q"))
        # The smallest pair has an empty key, a type and one byte. The smallest tensor entry has an empty
        # name, no dimensions, a type and an offset.
        self._expect_room(pair_count * 13, f"{pair_count} metadata entries")
        self._expect_room(tensor_count * 24, f"{tensor_count} tensors")
        metadata = self._metadata(pair_count)
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        header_bytes = self._at
        data_start = _round_up(self._at, self._alignment(metadata))
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise malformed(self._path, f"tensor {name!r} is listed twice")
            tensors[name] = self._tensor(name, shape, kind, data_start + offset)
        self._refuse_overlap(tensors)
        return GGUFHeader(
            path=self._path,
            metadata=MappingProxyType(metadata),
            tensors=MappingProxyType(tensors),
            header_bytes=header_bytes,
        )

    def _check_magic(self) -> None:
        start = self._data[: min(self._size, 256)]
        if start[:4] == b"GGUF":
            return
        why = _impostor(start)
        if why is None and start[:4] in (b"ggml", b"ggjt", b"ggmf", b"lmgg", b"tjgg", b"fmgg"):
            why = "it is in the old GGML format that GGUF replaced"
        if why is None:
            why = f"it begins with {start[:4]!r} instead of b'GGUF'"
        raise malformed(self._path, why)

    def _version_reason(self, version: int) -> str:
        if version & 0xFFFF == 0:
            return "it is big-endian; Kvant reads little-endian GGUF"
        return f"it is GGUF version {version}; Kvant reads versions 2 and 3"

    def _metadata(self, count: int) -> dict[str, MetadataValue]:
        metadata: dict[str, MetadataValue] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise malformed(self._path, f"metadata key {key!r} is there twice")
            metadata[key] = self._value(key)
        return metadata

    def _alignment(self, metadata: Mapping[str, MetadataValue]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise malformed(self._path, f"general.alignment is {alignment!r}")
        if alignment & (alignment - 1):
            raise malformed(self._path, f"general.alignment is {alignment}, no power of two")
        return alignment

    def _value(self, key: str) -> MetadataValue:
        kind = self._kind(key)
        if kind is _Value.STRING:
            return self._string()
        if kind is not _Value.ARRAY:
            return self._scalar(_SCALAR_CODE[kind])
        item = self._kind(key)
        count = int(self._scalar("Q"))
        if item is _Value.ARRAY:
            raise malformed(self._path, f"metadata {key!r} is an array of arrays")
        if item is _Value.STRING:
            self._expect_room(count * 8, f"the {count} strings of metadata {key!r}")
            return tuple(self._string() for _ in range(count))
        code = _SCALAR_CODE[item]
        self._expect_room(count * struct.calcsize(f"<{code}"), f"the {count} items of {key!r}")
        items = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{code}")
        return items

    def _kind(self, key: str) -> _Value:
        number = int(self._scalar("I"))
        try:
            return _Value(number)
        except ValueError:
            raise malformed(self._path, f"metadata {key!r} has unknown type {number}") from None

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = int(self._scalar("I"))
        if not 1 <= dims <= _MAX_DIMS:
            raise malformed(self._path, f"tensor {name!r} has {dims} dimensions")
        shape = tuple(int(self._scalar("Q")) for _ in range(dims))
        return name, shape[::-1], int(self._scalar("I")), int(self._scalar("Q"))

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise malformed(self._path, f"tensor {name!r} has unknown type {number}") from None
        elements = 1
        for length in shape:
            elements *= length
            if not 0 < elements <= _MAX_TENSOR_ELEMENTS:
                raise malformed(self._path, f"tensor {name!r} has the absurd shape {shape}")
        if shape[-1] % block:
            raise malformed(
                self._path,
                f"tensor {name!r} has rows of {shape[-1]}, not in {kind.name}'s blocks of {block}",
            )
        nbytes = elements // block * block_bytes
        if start + nbytes > self._size:
            raise malformed(
                self._path,
                f"tensor {name!r} ends at byte {start + nbytes}, but the file has {self._size}: "
                "an incomplete download?",
            )
        return GGUFTensor(name, shape, kind, start, nbytes)

    def _refuse_overlap(self, tensors: Mapping[str, GGUFTensor]) -> None:
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for first, second in itertools.pairwise(ordered):
            if first.start + first.nbytes > second.start:
                raise malformed(
                    self._path, f"tensors {first.name!r} and {second.name!r} share the same bytes"
                )

    def _scalar(self, code: str) -> bool | int | float:
        width = struct.calcsize(f"<{code}")
        self._expect_room(width, "a number")
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += width
        assert isinstance(value, bool | int | float)
        return value

    def _string(self) -> str:
        length = int(self._scalar("Q"))
        self._expect_room(length, f"a string of {length} bytes")
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise malformed(
                self._path, f"a string at byte {self._at - length} is no UTF-8"
            ) from None

    def _expect_room(self, nbytes: int, what: str) -> None:
        if nbytes > self._size - self._at:
            raise malformed(
                self._path,
                f"at byte {self._at} {what} would follow, but the file has {self._size} bytes: "
                "an incomplete download?",
            )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
