"""Values of the scales that a plan uses: a few bytes of each file, read at their offsets."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.facts import ScaleTensor, Side
from kvant.kv.checkpoint.safetensors_header import TensorEntry, read_header
from kvant.kv.spec import KVPlan, Scale, ScaleState

SMALLEST, LARGEST = 2.0**-40, 2.0**40
"""Scales outside this range are invalid: keys and values themselves never leave it."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    layer: int
    side: Side
    scale: Scale
    tensor: ScaleTensor


def read_scale_values(directory: Path, plan: KVPlan) -> dict[tuple[int, Side], tuple[float, ...]]:
    """Every scale that is FOUND, by layer index and side: 1 value or one per KV head.

    `stored * value = number`: inverse tensors are inverted and the plan's factor is applied.
    Raises BadCheckpoint, naming tensor and file, for a value that is no scale: zero, negative, NaN,
    infinite or absurd; and for files that changed since the plan.
    """
    by_file: dict[str, list[_Wanted]] = {}
    for wanted in _wanted(plan):
        by_file.setdefault(wanted.tensor.file, []).append(wanted)
    values: dict[tuple[int, Side], tuple[float, ...]] = {}
    for file, found in by_file.items():
        path = directory / file
        header = read_header(path)
        for wanted in found:
            tensor = wanted.tensor
            entry = header.tensors.get(tensor.name)
            if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                raise BadCheckpoint(
                    f"{tensor.name} in {path} changed", why="it is not what was there when planning"
                )
            raw = _read(path, entry)
            _refuse_no_scale(raw, tensor.name, path)
            plain = [1.0 / value for value in raw] if tensor.inverse else raw
            key = (wanted.layer, wanted.side)
            values[key] = tuple(value * wanted.scale.factor for value in plain)
    return values


def _wanted(plan: KVPlan) -> Iterator[_Wanted]:
    for layer in plan.layers:
        for side, choice in ((Side.K, layer.k), (Side.V, layer.v)):
            if choice is not None and choice.scale.state is ScaleState.FOUND:
                assert choice.scale.tensor is not None
                yield _Wanted(layer.geometry.index, side, choice.scale, choice.scale.tensor)


def _read(path: Path, entry: TensorEntry) -> list[float]:
    try:
        with path.open("rb") as file:
            file.seek(entry.begin)
            data = file.read(entry.num_bytes)
    except OSError as fault:
        raise BadCheckpoint(f"{path} cannot be read", why=fault.strerror or str(fault)) from None
    if len(data) < entry.num_bytes:
        raise BadCheckpoint(f"{path} is cut off", why=f"inside {entry.name}")
    return _decode(data, entry)


def _decode(data: bytes, entry: TensorEntry) -> list[float]:
    """Little-endian numbers. BF16 is the upper half of a float32."""
    if entry.dtype == "F32":
        return [value for (value,) in struct.iter_unpack("<f", data)]
    if entry.dtype == "F16":
        return [value for (value,) in struct.iter_unpack("<e", data)]
    assert entry.dtype == "BF16", "the audit lets no other dtype through"
    halves = (half for (half,) in struct.iter_unpack("<H", data))
    return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]


def _refuse_no_scale(values: list[float], name: str, path: Path) -> None:
    for at, value in enumerate(values):
        if math.isfinite(value) and SMALLEST <= value <= LARGEST:
            continue
        place = f" at {at}" if len(values) > 1 else ""
        raise BadCheckpoint(
            f"{name} in {path} is {value}{place}",
            why=f"a scale is a number from {SMALLEST:g} to {LARGEST:g}",
        )
