"""AMD Quark: which layers, and what their output tensors look like.

    {"quant_method": "quark",
     "export": {"kv_cache_group": ["*k_proj", "*v_proj"], ..},
     "layer_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", ..}}, ..}}

An empty group means no KV quantisation. Names without a wildcard choose single layers. The spec may
stand under `kv_cache_quant_config` instead, where newer exporters put it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvant.kv.checkpoint.declaration import Declaration, unreadable
from kvant.kv.checkpoint.facts import KVWish, ScalePromise, UnreadableWish, Wish
from kvant.kv.checkpoint.lookup import LAYER_LISTS, TEXT_PREFIXES, read_place
from kvant.kv.checkpoint.scales import ATTENTION_MODULES
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side

GROUP = "kv_cache_group"

# A pattern of nothing but these words means every layer.
_ANYWHERE = ATTENTION_MODULES | LAYER_LISTS | TEXT_PREFIXES
_SEPARATORS = re.compile(r"[.*]+")

_SIDES = {
    "k_proj": frozenset({Side.K}),
    "v_proj": frozenset({Side.V}),
    "qkv_proj": frozenset({Side.K, Side.V}),
    "kv_proj": frozenset({Side.K, Side.V}),
}


def read(config: Mapping[str, Any], where: str) -> Declaration:
    """Returns the KV part of a Quark config. It is never None; it may declare "none"."""
    export = config.get("export")
    if not isinstance(export, Mapping):
        return unreadable(
            where, "quark", "its `export` section, which names the KV layers, is missing"
        )
    place, group = f"{where}.export.{GROUP}", export.get(GROUP)
    if group is None or group == []:
        return Declaration(place, "none")
    if not isinstance(group, list) or not all(isinstance(name, str) for name in group):
        return unreadable(place, f"{group!r}", f"{GROUP} is a list of names")
    specs = {name: _spec(config, name) for name in group}
    lacking = [name for name, spec in specs.items() if spec is None]
    if lacking:
        return unreadable(
            place, f"{group!r}", f"{', '.join(lacking)} has no output_tensors in layer_quant_config"
        )
    if any(spec != specs[group[0]] for spec in specs.values()):
        return unreadable(place, f"{specs!r}", "the group's output_tensors differ")
    spec = specs[group[0]]
    assert spec is not None
    return _declare(group, spec, place)


def _spec(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    for key in ("layer_quant_config", "kv_cache_quant_config"):
        section = config.get(key)
        layer = section.get(name) if isinstance(section, Mapping) else None
        spec = layer.get("output_tensors") if isinstance(layer, Mapping) else None
        if isinstance(spec, Mapping):
            return spec
    return None


def _declare(group: list[str], spec: Mapping[str, Any], place: str) -> Declaration:
    everywhere: set[Side] = set()
    single: dict[str, set[Side]] = {}
    for name in group:
        words = [word for word in _SEPARATORS.split(name) if word]
        sides = _SIDES.get(words[-1]) if words else None
        if sides is None:
            return unreadable(place, name, f"known endings are {', '.join(_SIDES)}")
        module = name.rpartition(".")[0]
        if "*" not in name and read_place(module) is not None:
            single.setdefault(module, set()).update(sides)
        elif "*" in name and _ANYWHERE.issuperset(words[:-1]):
            everywhere |= sides
        else:
            return unreadable(place, name, "a name is *k_proj, or a projection's full path")
    if everywhere and single:
        return unreadable(place, f"{group!r}", "it names all layers and single ones")
    shown = f"{spec.get('dtype')} {spec.get('qscheme')}"
    if single:
        wishes = {
            module: _wish(spec, sides, f"{place}[{module!r}]") for module, sides in single.items()
        }
        return Declaration(place, f"{shown} for {sorted(single)}", None, wishes)
    letters = "".join(sorted(side.value for side in everywhere))
    return Declaration(place, f"{shown} for {letters}", _wish(spec, everywhere, place))


def _wish(spec: Mapping[str, Any], sides: set[Side], where: str) -> Wish:
    dtype, scheme, dynamic = (spec.get(key) for key in ("dtype", "qscheme", "is_dynamic"))
    asked = f"{dtype} {scheme}{' dynamic' if dynamic else ''}"
    if dtype == "fp8_e4m3" and scheme == "per_tensor" and dynamic in (False, None):
        k, v = (KVDtype.FP8_E4M3 if side in sides else None for side in (Side.K, Side.V))
        return KVWish(k, v, where, ScalePromise.STATIC)
    nearest = _NEAREST.get(dtype) if isinstance(dtype, str) else None
    hint = "" if nearest is None else f"; the nearest is {nearest}, which has to be asked for"
    return UnreadableWish(
        where, asked, f"Kvant reads fp8_e4m3 per_tensor, static, here{hint}", nearest
    )


_NEAREST = {
    "fp8_e4m3": KVDtype.FP8_PER_TOKEN_HEAD,
    "fp8_e5m2": KVDtype.FP8_E5M2,
    "int8": KVDtype.INT8_PER_TOKEN_HEAD,
    "uint8": KVDtype.INT8_PER_TOKEN_HEAD,
    "int4": KVDtype.INT4_PER_TOKEN_HEAD,
    "uint4": KVDtype.INT4_PER_TOKEN_HEAD,
    "fp4": KVDtype.NVFP4,
}
