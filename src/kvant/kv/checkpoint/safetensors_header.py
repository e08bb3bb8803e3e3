"""Headers of safetensors files: the location of every tensor. No tensor is read here.

    8 bytes    length N of the header, little endian
    N bytes    JSON: {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, ..}
    the rest   the tensors' bytes, without holes; offsets count from here

(format: huggingface/safetensors README, "Format"). Everything in a header is checked before it is
used; what is wrong is a BadCheckpoint that names the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from kvant.errors import BadCheckpoint, WayOut
from kvant.kv.checkpoint.json_file import (
    COPY_AGAIN,
    parse_json_object,
    read_json_object,
    refuse_lfs_pointer,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

_LENGTH_BYTES = 8

# Bits per element. A dtype that is not here is newer than this table: its size is not checked.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a tensor [*shape]; 0 for a dtype that is newer than this table."""
    return _BITS.get(dtype, 0) * math.prod(shape) // 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header. begin, end: byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """One file's tensors by name."""

    path: Path
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Which safetensors files make up a checkpoint.

    shard_of: file name by tensor name, from the index; empty without one. total_bytes: the index's
    own sum. present: whether the files are there (an index may come alone).
    """

    paths: tuple[Path, ...]
    shard_of: Mapping[str, str]
    total_bytes: int | None
    present: bool


def find_weight_files(directory: Path) -> WeightFiles:
    """Returns the safetensors files of a model directory, as its index or their names say.

    With an index, exactly its files count, and all or none must exist: a part is a broken download.
    Without one that counts, model.safetensors alone counts, else every safetensors file.
    """
    if is_indexed(directory):
        return _from_index(directory / INDEX_NAME)
    single = directory / SINGLE_NAME
    paths: tuple[Path, ...] = (single,)
    if not os.path.isfile(single):
        paths = tuple(sorted(p for p in directory.glob("*.safetensors") if os.path.isfile(p)))
    return WeightFiles(paths, {}, None, bool(paths))


def is_indexed(directory: Path) -> bool:
    """Returns whether an index says which files count.

    Beside a model.safetensors that it does not name, transformers reads that file alone.
    """
    index = directory / INDEX_NAME
    if not os.path.isfile(index):
        return False
    if not os.path.isfile(directory / SINGLE_NAME):
        return True
    shard_of = read_json_object(index).get("weight_map")
    return not isinstance(shard_of, dict) or not shard_of or SINGLE_NAME in shard_of.values()


def read_headers(directory: Path) -> tuple[Header, ...] | None:
    """Headers of all of a checkpoint's files, or None where there are no safetensors files.

    A tensor that two files claim, or that is not where the index says, is a BadCheckpoint.
    """
    files = find_weight_files(directory)
    if not files.present:
        return None
    headers = tuple(read_header(path) for path in files.paths)
    home: dict[str, Path] = {}
    for header in headers:
        for name in header.tensors:
            if name in home:
                raise BadCheckpoint(
                    f"tensor {name!r} is in two files", why=f"{home[name]} and {header.path}"
                )
            home[name] = header.path
    path_of = {shard: directory / shard for shard in set(files.shard_of.values())}
    for name, shard in files.shard_of.items():
        if home.get(name) != path_of[shard]:
            raise BadCheckpoint(
                f"{path_of[shard]} lacks tensor {name!r}",
                why=f"{INDEX_NAME} says it is there",
                ways_out=(COPY_AGAIN,),
            )
    return headers


def read_header(path: Path) -> Header:
    """Returns one file's header. Raises BadCheckpoint if it is not a whole safetensors file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _parse(_header_json(file, size, path), size, path)
    except OSError as fault:
        raise BadCheckpoint(f"{path} cannot be read", why=fault.strerror or str(fault)) from None


def _header_json(file: BinaryIO, size: int, path: Path) -> bytes:
    head = file.read(_LENGTH_BYTES)
    refuse_lfs_pointer(head + file.read(32), path)
    if len(head) < _LENGTH_BYTES:
        raise _broken(path, f"{len(head)} bytes, not even a header's length")
    length = int.from_bytes(head, "little")
    if length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise _broken(path, f"it claims a header of {length} bytes, and the file has {size}")
    file.seek(_LENGTH_BYTES)
    data = file.read(length)
    if len(data) < length:
        raise _broken(path, f"the header ends after {len(data)} of {length} bytes")
    return data


def _parse(data: bytes, file_size: int, path: Path) -> Header:
    header = parse_json_object(data, path)
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + len(data)
    tensors = {name: _entry(name, fields, start, path) for name, fields in header.items()}
    _refuse_holes(tensors, start, file_size, path)
    return Header(path, tensors)


def _entry(name: str, fields: Any, start: int, path: Path) -> TensorEntry:
    if not isinstance(fields, dict):
        raise _broken(path, f"entry {name!r} is no object")
    dtype = fields.get("dtype")
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if not isinstance(dtype, str):
        raise _broken(path, f"tensor {name!r} has no dtype")
    if shape is None:
        raise _broken(path, f"tensor {name!r} has shape {fields.get('shape')!r}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(path, f"tensor {name!r} has data_offsets {fields.get('data_offsets')!r}")
    begin, end = offsets
    bits = _BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != 8 * (end - begin):
        raise _broken(
            path, f"tensor {name!r} ({dtype}, shape {shape}) cannot take {end - begin} bytes"
        )
    return TensorEntry(name, dtype, shape, start + begin, start + end)


def _counts(values: Any) -> tuple[int, ...] | None:
    """Returns a list of whole numbers that fit 63 bits, or None for anything else."""
    if not isinstance(values, list):
        return None
    return tuple(values) if all(type(v) is int and 0 <= v < 2**63 for v in values) else None


def _refuse_holes(
    tensors: Mapping[str, TensorEntry], start: int, file_size: int, path: Path
) -> None:
    """Tensors must cover the rest of the file; otherwise the download is truncated."""
    position = start
    for entry in sorted(tensors.values(), key=lambda e: (e.begin, e.end)):
        if entry.begin != position:
            raise _broken(
                path, f"tensor {entry.name!r} begins at byte {entry.begin}, not {position}"
            )
        position = entry.end
    if position > file_size:
        raise _broken(path, f"it is cut off: {file_size} bytes of {position}")
    if position < file_size:
        raise _broken(path, f"{file_size - position} bytes at its end belong to no tensor")


def _from_index(index: Path) -> WeightFiles:
    content = read_json_object(index)
    shard_of = content.get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise BadCheckpoint(f"{index} has no weight_map", ways_out=(COPY_AGAIN,))
    shards: set[str] = set()
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or (shard not in shards and not _stays_inside(shard)):
            raise BadCheckpoint(
                f"{index} puts tensor {name!r} into {shard!r}",
                why="no file there",
                ways_out=(COPY_AGAIN,),
            )
        shards.add(shard)
    paths = tuple(index.parent / shard for shard in sorted(shards))
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing and len(missing) < len(paths):
        raise BadCheckpoint(
            f"{missing[0]} is missing",
            why=f"{index.name} lists {len(paths)} files, {len(missing)} are not there",
            ways_out=(WayOut("download the model again; finished files are kept"),),
        )
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(total, int | float) or not 0 < total < 2**63:
        return WeightFiles(paths, shard_of, None, not missing)
    return WeightFiles(paths, shard_of, int(total), not missing)  # old writers stored a float


def _stays_inside(shard: str) -> bool:
    path = PurePosixPath(shard)
    return bool(shard) and not path.is_absolute() and ".." not in path.parts and "\0" not in shard


def _broken(path: Path, why: str) -> BadCheckpoint:
    what = f"{path} is no whole safetensors file"
    return BadCheckpoint(what, why=why, ways_out=(COPY_AGAIN,))
