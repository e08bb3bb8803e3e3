"""Scale tensors of a checkpoint: their names, where they lie, and their values.

Every exporter's spelling has one meaning:

    <module>.k_scale   .v_scale   .kv_scale       AutoFP8, compressed-tensors; kv: one for both
    <module>.k_global_scale   .v_global_scale     compressed-tensors' nvfp4
    <module>.k_proj.k_scale   .v_proj.v_scale     ModelOpt; also on fused projections (qkv_proj)
    <module>.k_proj.output_scale   .v_proj..      Quark, early compressed-tensors; also .q_proj
    <module>.q_scale   .prob_output_scale         for attention computed in 8 bits: not needed

<module> is the attention module ("model.layers.0.self_attn"); an `attn` that vLLM inserts behind it
is dropped. Everything in front of the last parts is left alone, so multimodal prefixes pass
through.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.safetensors_header import Header, TensorEntry, read_header
from kvant.kv.format import Side
from kvant.kv.spec import KVPlan, Scale, ScaleState, ScaleTensor


class ScaleRole(Enum):
    """What a tensor is for."""

    SCALE = "scale"
    GLOBAL_SCALE = "global scale"  # above block scales; compressed-tensors stores 1 / scale
    QUERY = "query scale"
    PROBABILITY = "probability scale"
    OFFSET = "offset"
    CHANNEL = "channel scale or offset"  # Ascend C8


WHY_IGNORED = {
    ScaleRole.QUERY: "not needed, queries are not quantised here",
    ScaleRole.PROBABILITY: "not needed, attention probabilities are not quantised here",
    ScaleRole.OFFSET: "not used, no format here takes offsets from a checkpoint",
    ScaleRole.CHANNEL: "not used, no format here has one scale per channel",
}


@dataclass(frozen=True, slots=True)
class ScaleName:
    """The meaning of a tensor's name. sides: both for `kv_scale`, none if it is about neither K nor V."""

    module: str
    role: ScaleRole
    sides: tuple[Side, ...]


_K = (Side.K,)
_V = (Side.V,)

_LEAVES: dict[str, tuple[ScaleRole, tuple[Side, ...]]] = {
    "k_scale": (ScaleRole.SCALE, _K),
    "v_scale": (ScaleRole.SCALE, _V),
    "kv_scale": (ScaleRole.SCALE, (Side.K, Side.V)),
    "k_global_scale": (ScaleRole.GLOBAL_SCALE, _K),
    "v_global_scale": (ScaleRole.GLOBAL_SCALE, _V),
    "q_scale": (ScaleRole.QUERY, ()),
    "q_global_scale": (ScaleRole.QUERY, ()),
    "prob_scale": (ScaleRole.PROBABILITY, ()),
    "prob_output_scale": (ScaleRole.PROBABILITY, ()),
    "k_zero_point": (ScaleRole.OFFSET, _K),
    "v_zero_point": (ScaleRole.OFFSET, _V),
    "k_bias": (ScaleRole.OFFSET, _K),
    "v_bias": (ScaleRole.OFFSET, _V),
    "k_cache_scale": (ScaleRole.CHANNEL, _K),
    "v_cache_scale": (ScaleRole.CHANNEL, _V),
    "k_cache_offset": (ScaleRole.CHANNEL, _K),
    "v_cache_offset": (ScaleRole.CHANNEL, _V),
}

_OUTPUTS = {
    "k_proj": (ScaleRole.SCALE, _K),
    "v_proj": (ScaleRole.SCALE, _V),
    "q_proj": (ScaleRole.QUERY, ()),
}

# Projections inside an attention module that carry scales, fused ones included.
_PROJECTIONS = frozenset(
    {"k_proj", "v_proj", "q_proj", "qkv_proj", "kv_proj", "kv_b_proj", "kv_a_proj_with_mqa",
     "qkv", "query_key_value", "Wqkv", "W_pack", "c_attn"}
)  # fmt: skip

_INSERTED = frozenset({"attn", "mla_attn"})

ATTENTION_MODULES = frozenset({"self_attn", "attention", "attn", "self_attention", "mixer"})
"""What architectures call their one causal attention module; the names mean the same."""


def read_scale_name(name: str) -> ScaleName | None:
    """Returns what the tensor `name` is for KV quantisation, or None for any other tensor."""
    parts = name.split(".")
    leaf = parts.pop()
    if not parts:
        return None
    found = _OUTPUTS.get(parts[-1]) if leaf == "output_scale" else _LEAVES.get(leaf)
    if found is None:
        return None
    role, sides = found
    if parts[-1] in _PROJECTIONS and len(parts) > 1:
        parts.pop()
    while len(parts) > 1 and parts[-1] in _INSERTED and parts[-2] in ATTENTION_MODULES | _INSERTED:
        parts.pop()
    return ScaleName(".".join(parts), role, sides)


@dataclass(frozen=True, slots=True)
class FoundScales:
    """scales: by attention module and side. ignored: "name: why not" of related tensors that are not used."""

    scales: Mapping[tuple[str, Side], ScaleTensor]
    ignored: tuple[str, ...]


def find_scales(headers: Iterable[Header], directory: Path) -> FoundScales:
    """Attaches every scale to its attention module and side; files are named relative to `directory`.

    Two tensors for one place stay visible as rivals: Kvant does not guess which one counts. The
    one exception is a global scale beside block scales, which Kvant computes row by row itself.
    """
    found: dict[tuple[str, Side], dict[ScaleRole, list[ScaleTensor]]] = {}
    ignored: list[str] = []
    for header in headers:
        file = header.path.relative_to(directory).as_posix()
        for entry in header.tensors.values():
            name = read_scale_name(entry.name)
            if name is None:
                continue
            if name.role in WHY_IGNORED:
                ignored.append(f"{entry.name}: {WHY_IGNORED[name.role]}")
                continue
            for side in name.sides:
                roles = found.setdefault((name.module, side), {})
                roles.setdefault(name.role, []).append(_tensor(file, entry, name, side))
    scales: dict[tuple[str, Side], ScaleTensor] = {}
    for place, roles in found.items():
        main, *rest = roles.get(ScaleRole.GLOBAL_SCALE, []) + roles.get(ScaleRole.SCALE, [])
        rivals = [tensor for tensor in rest if tensor.inverse == main.inverse]
        ignored += [
            f"{tensor.name}: not used, block scales are computed row by row"
            for tensor in rest
            if tensor not in rivals
        ]
        scales[place] = replace(main, rivals=tuple(tensor.name for tensor in rivals))
    return FoundScales(scales, tuple(ignored))


def _tensor(file: str, entry: TensorEntry, name: ScaleName, side: Side) -> ScaleTensor:
    return ScaleTensor(
        name=entry.name,
        file=file,
        shape=entry.shape,
        dtype=entry.dtype,
        layer=name.module,
        side=side,
        inverse=name.role is ScaleRole.GLOBAL_SCALE,
    )


SMALLEST, LARGEST = 2.0**-40, 2.0**40
"""Scales outside this range are invalid: keys and values themselves never leave it."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    layer: int
    side: Side
    scale: Scale
    tensor: ScaleTensor


def read_scale_values(directory: Path, plan: KVPlan) -> dict[tuple[int, Side], tuple[float, ...]]:
    """Returns every scale that is FOUND, by layer index and side: 1 value or one per KV head.

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
                    f"{tensor.name} in {path} changed",
                    why="its dtype or shape differs from the plan",
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
            if choice is None or choice.dtype.format.takes_rounding:
                continue
            if choice.scale.state is ScaleState.FOUND:
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
