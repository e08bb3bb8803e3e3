"""Tiny checkpoints on disk, written byte by byte, and layers to look them up for."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.kv.checkpoint.facts import CheckpointKV, KVWish
from kvant.kv.checkpoint.lookup import wish_for
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, Scale, Source

NUM_LAYERS = 2
NUM_KV_HEADS = 4


@dataclass(frozen=True)
class Raw:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def f32(*values: float, shape: tuple[int, ...] | None = None) -> Raw:
    return Raw("F32", shape or (len(values),), struct.pack(f"<{len(values)}f", *values))


def f16(*values: float) -> Raw:
    return Raw("F16", (len(values),), struct.pack(f"<{len(values)}e", *values))


def bf16(*values: float) -> Raw:
    """Values must be representable: their lower 16 bits are cut off."""
    halves = [struct.unpack("<I", struct.pack("<f", value))[0] >> 16 for value in values]
    return Raw("BF16", (len(values),), struct.pack(f"<{len(values)}H", *halves))


def weight(num_elements: int = 8) -> Raw:
    return Raw("BF16", (num_elements,), bytes(2 * num_elements))


def safetensors_bytes(tensors: Mapping[str, Raw]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, raw in tensors.items():
        offsets = [len(data), len(data) + len(raw.data)]
        header[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": offsets}
        data += raw.data
    return header_bytes(header) + data


def header_bytes(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def scales(
    names: Sequence[str] = ("k_scale", "v_scale"),
    *,
    prefix: str = "model.layers.{}.self_attn.",
    value: float = 0.5,
    num_layers: int = NUM_LAYERS,
) -> dict[str, Raw]:
    """One float32 scale per layer and name."""
    return {
        prefix.format(layer) + name: f32(value) for layer in range(num_layers) for name in names
    }


def write(
    directory: Path,
    quantization: Any = None,
    *,
    tensors: Mapping[str, Raw] | None = None,
    hf_quant: Any = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A model directory. tensors None: no weight files at all."""
    directory.mkdir(parents=True, exist_ok=True)
    body: dict[str, Any] = {"model_type": "llama", **(config or {})}
    if quantization is not None:
        body["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(body))
    if hf_quant is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(hf_quant))
    if tensors is not None:
        shard = {"model.embed_tokens.weight": weight(), **tensors}
        (directory / "model.safetensors").write_bytes(safetensors_bytes(shard))
    return directory


def compressed_tensors(scheme: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}


FP8_SCHEME: dict[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "tensor",
    "symmetric": True, "type": "float", "zp_dtype": None,
}  # fmt: skip
"""As llm-compressor writes it."""


def modelopt_file(algo: Any, **more: Any) -> dict[str, Any]:
    """hf_quant_config.json."""
    quantization = {"quant_algo": None, "kv_cache_quant_algo": algo, **more}
    return {"producer": {"name": "modelopt", "version": "0.43.0"}, "quantization": quantization}


def modelopt_config(scheme: Any, **more: Any) -> dict[str, Any]:
    """The same as ModelOpt converts it for config.json."""
    return {"quant_method": "modelopt", "ignore": [], "kv_cache_scheme": scheme, **more}


MODELOPT_FP8_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


def layer(
    index: int = 0,
    name: str = "model.layers.{}.self_attn",
    *,
    num_kv_heads: int = NUM_KV_HEADS,
    attention: Attention = Attention.FULL,
) -> LayerGeometry:
    return LayerGeometry(
        index=index,
        name=name.format(index),
        attention=attention,
        num_q_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim_k=64,
        head_dim_v=64,
    )


def followed(checkpoint: CheckpointKV, at: LayerGeometry) -> KVWish:
    wish = wish_for(checkpoint, at)
    assert isinstance(wish, KVWish)
    return wish


def plan_of(chosen: Mapping[LayerGeometry, Mapping[Side, tuple[KVDtype, Scale]]]) -> KVPlan:
    """A plan that stores what `chosen` says, with any source."""

    def choice(sides: Mapping[Side, tuple[KVDtype, Scale]], side: Side) -> Choice | None:
        if side not in sides:
            return None
        dtype, scale = sides[side]
        return Choice(dtype, Source.EXPLICIT, "test", (), scale)

    specs = tuple(
        LayerSpec(at, choice(sides, Side.K), choice(sides, Side.V), "reference")
        for at, sides in chosen.items()
    )
    return KVPlan(Role.TARGET, "test", ComputeDtype.BFLOAT16, "test", 16, specs)


def num_bytes(raw: Raw) -> int:
    return math.prod(raw.shape) * {"F32": 4, "BF16": 2, "F16": 2}[raw.dtype]
