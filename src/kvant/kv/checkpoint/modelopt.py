"""NVIDIA ModelOpt: `hf_quant_config.json`, and the same converted inside `config.json`.

    hf_quant_config.json   {"producer": .., "quantization": {"kv_cache_quant_algo": "FP8", ..}}
    config.json            {"quant_method": "modelopt", "kv_cache_scheme": {..} or "NVFP4", ..}

`kv_cache_scheme` is an object for FP8 and a bare algorithm name for everything else
(modelopt/torch/export/convert_hf_config.py). A per-layer map, `kv_cache_quantized_layers` with
`kv_cache_schema_version` 1, stands beside either; layers it leaves out are not quantised.

No field says whether scales were calibrated: the default recipes `fp8_cast` and `nvfp4_cast` write
no scale tensors on purpose and mean 1.0. So the weight files decide, see `settle_promises`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvant.kv.checkpoint.compressed_tensors import IllegalArgs, read_args
from kvant.kv.checkpoint.declaration import Declaration, unreadable
from kvant.kv.checkpoint.facts import KVWish, ScalePromise, UnreadableWish, Wish
from kvant.kv.checkpoint.lookup import same_layer
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.spec import ScaleTensor

ALGO, SCHEME = "kv_cache_quant_algo", "kv_cache_scheme"
LAYERS, SCHEMA = "kv_cache_quantized_layers", "kv_cache_schema_version"
MIXED = "MIXED_PRECISION"

_ALGOS: dict[str, tuple[KVDtype, KVDtype]] = {
    "FP8": (KVDtype.FP8_E4M3, KVDtype.FP8_E4M3),
    "NVFP4": (KVDtype.NVFP4, KVDtype.NVFP4),
    "FP8_K_NVFP4_V": (KVDtype.FP8_E4M3, KVDtype.NVFP4),
}

_LACKING: dict[str, tuple[str, KVDtype]] = {
    "INT8": ("8-bit integers with one scale per tensor", KVDtype.INT8_PER_TOKEN_HEAD),
    "NVFP4_AFFINE": ("nvfp4 with offsets", KVDtype.NVFP4),
    "NVFP4_ROTATE": ("nvfp4 with rotated keys", KVDtype.NVFP4),
    "FP8_AFFINE": ("8-bit floats with offsets", KVDtype.FP8_PER_TOKEN_HEAD),
}


def read(config: Mapping[str, Any], where: str) -> Declaration | None:
    """Returns the KV part of a ModelOpt config, either file; None where it does not mention KV."""
    inner = config.get("quantization")
    if isinstance(inner, Mapping):
        config, where = inner, f"{where}.quantization"
    if LAYERS in config and config[LAYERS] is not None:
        return _read_map(config, where)
    stated = {key: config[key] for key in (ALGO, SCHEME) if key in config}
    if not stated:
        return None
    algos = {key: _algo(value) for key, value in stated.items()}
    place = f"{where}.{next(iter(stated))}"
    if len(set(algos.values())) > 1:
        said = " against ".join(f"{algo} ({key})" for key, algo in algos.items())
        return unreadable(where, said, "the two keys disagree")
    algo = next(iter(algos.values()))
    if algo == "none":
        return Declaration(place, "none")
    if algo == MIXED:
        return unreadable(place, MIXED, f"it needs {LAYERS}, and there is none")
    return Declaration(place, algo, _wish(algo, place), promises_open=True)


def settle_promises(
    declared: Declaration, scales: Mapping[tuple[str, Side], ScaleTensor]
) -> Declaration:
    """Distinguishes calibrated exports from cast recipes by the weight files' tensors.

    If any layer of an algorithm has a scale, all its layers must have one.
    """
    if not declared.promises_open:
        return declared
    scheme, per_layer = declared.scheme, declared.per_layer
    if isinstance(scheme, KVWish) and scales:
        scheme = replace(scheme, promise=ScalePromise.STATIC)
    calibrated = {
        (wish.k, wish.v)
        for name, wish in per_layer.items()
        if isinstance(wish, KVWish) and any(same_layer(name, module) for module, _ in scales)
    }
    settled: dict[str, Wish] = {
        name: replace(wish, promise=ScalePromise.STATIC)
        if isinstance(wish, KVWish) and (wish.k, wish.v) in calibrated
        else wish
        for name, wish in per_layer.items()
    }
    return replace(declared, scheme=scheme, per_layer=settled)


def _algo(value: Any) -> str:
    """Returns the algorithm's name in capitals, "none", or a text that is no algorithm."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return "none" if value.lower() == "none" else value.upper()
    try:
        args = read_args(value)
    except IllegalArgs as fault:
        return f"{value!r} ({fault})"
    static = args.symmetric and args.dynamic is not True
    if static and args.is_float and args.num_bits == 8 and args.strategy == "tensor":
        return "FP8"
    blocks = args.group_size == KVDtype.NVFP4.format.block
    if static and args.is_float and args.num_bits == 4 and blocks:
        return "NVFP4"
    if static and not args.is_float and args.num_bits == 8 and args.strategy == "tensor":
        return "INT8"
    return str(args)


def _wish(algo: str, where: str) -> Wish:
    if algo in _ALGOS:
        return KVWish(*_ALGOS[algo], where, ScalePromise.CAST)
    supported = f"supported are {', '.join(_ALGOS)} and {MIXED} with {LAYERS}"
    if algo not in _LACKING:
        return UnreadableWish(where, algo, f"Kvant does not know it; {supported}")
    what, nearest = _LACKING[algo]
    return UnreadableWish(
        where,
        algo,
        f"Kvant has no {what}; {supported}; the nearest is {nearest}, which has to be asked for",
        nearest,
    )


def _read_map(config: Mapping[str, Any], where: str) -> Declaration:
    layers, version, place = config[LAYERS], config.get(SCHEMA), f"{where}.{LAYERS}"
    if type(version) is not int or version != 1:
        return unreadable(place, LAYERS, f"{SCHEMA} is {version!r}; Kvant reads 1")
    if not isinstance(layers, Mapping) or not layers:
        return unreadable(place, LAYERS, f"it is {layers!r}, not an object that names layers")
    algos = {name: _entry(entry) for name, entry in layers.items()}
    kinds = set(algos.values()) - {"none"}
    for key in (ALGO, SCHEME):
        stated = _algo(config[key]) if key in config else MIXED
        if stated != MIXED and kinds != {stated}:
            found = ", ".join(sorted(kinds))
            return unreadable(where, f"{stated} against {found}", f"{key} and {LAYERS} disagree")
    wishes: dict[str, Wish] = {}
    for name, algo in algos.items():
        here = f"{place}[{name!r}]"
        none = KVWish(None, None, here, ScalePromise.NONE)
        wishes[name] = none if algo == "none" else _wish(algo, here)
    said = json.dumps(algos, sort_keys=True)
    return Declaration(place, said, None, wishes, promises_open=True)


def _entry(entry: Any) -> str:
    """One layer's algorithm; an entry with parts that Kvant does not know is none it can read."""
    if not isinstance(entry, Mapping) or "quant_algo" not in entry:
        return f"{entry!r}"
    algo = _algo(entry["quant_algo"])
    others = {key: value for key, value in entry.items() if key != "quant_algo"}
    if algo == "NVFP4" and others.get("group_size") == KVDtype.NVFP4.format.block:
        del others["group_size"]
    return f"{algo} with {others}" if others else algo
