"""compressed-tensors: `quantization_config.kv_cache_scheme`, an object of type QuantizationArgs.

Fields, defaults and legal combinations: compressed_tensors/quantization/quant_args.py (the model
forbids unknown keys; `type` defaults to "int"; without `strategy` it follows from group_size). The
scheme holds for every attention module: the config's `ignore` list is not consulted for KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvant.kv.checkpoint.declaration import Declaration
from kvant.kv.checkpoint.facts import KVWish, ScalePromise, UnreadableWish, Wish
from kvant.kv.dtype import KVDtype

KEY = "kv_cache_scheme"

_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
_DYNAMIC_STRATEGIES = ("token", "tensor", "tensor_group", "group")
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "int8", "uint8", "int16", "int32",
)  # fmt: skip


class IllegalArgs(ValueError):
    """The fields do not make a legal QuantizationArgs; the message says which and why."""


@dataclass(frozen=True, slots=True)
class QuantArgs:
    """A legal QuantizationArgs, strategy inferred. dynamic: False, True or "local"."""

    num_bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int | None
    dynamic: bool | str

    def __str__(self) -> str:
        """Returns the normal form by which declarations are compared, and what a plan shows."""
        kind = "float" if self.is_float else "int"
        size = f" of {self.group_size}" if self.group_size else ""
        extra = "" if self.symmetric else ", asymmetric"
        when = {False: "static", True: "dynamic", "local": "dynamic local"}[self.dynamic]
        return f"{self.num_bits}-bit {kind} per {self.strategy}{size}, {when}{extra}"


def read(config: Mapping[str, Any], where: str) -> Declaration | None:
    """Returns the KV part of a compressed-tensors config; None where it has no `kv_cache_scheme`."""
    if KEY not in config:
        return None
    scheme, place = config[KEY], f"{where}.{KEY}"
    if scheme is None:
        return Declaration(place, "none")
    said, wish = read_scheme(scheme, place)
    return Declaration(place, said, wish)


def read_scheme(scheme: Any, where: str) -> tuple[str, Wish]:
    """Returns a scheme's normal form and the wish it makes."""
    try:
        args = read_args(scheme)
    except IllegalArgs as fault:
        said = str(scheme)
        return said, UnreadableWish(where, said, str(fault))
    return str(args), to_wish(args, where)


def read_args(scheme: Any) -> QuantArgs:
    """Checks a QuantizationArgs object as its own library does. IllegalArgs says what is wrong."""
    if not isinstance(scheme, Mapping):
        raise IllegalArgs(f"a scheme is an object, not {scheme!r}")
    unknown = sorted(set(scheme) - set(_FIELDS))
    if unknown:
        raise IllegalArgs(f"unknown keys {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
    given = {key: scheme.get(key, default) for key, default in _FIELDS.items()}
    num_bits = given["num_bits"]
    if type(num_bits) is not int or num_bits < 1:
        raise IllegalArgs(f"num_bits is {num_bits!r}")
    kind = _word(given["type"], "type", ("int", "float"))
    if not isinstance(given["symmetric"], bool):
        raise IllegalArgs(f"symmetric is {given['symmetric']!r}")
    group_size = given["group_size"]
    if group_size is not None and (type(group_size) is not int or group_size < -1):
        raise IllegalArgs(f"group_size is {group_size!r}")
    dynamic = given["dynamic"]
    if not isinstance(dynamic, bool):
        dynamic = _word(dynamic, "dynamic", ("local",))
    strategy = _strategy(given["strategy"], group_size)
    _refuse_combinations(strategy, group_size, dynamic, given)
    return QuantArgs(num_bits, kind == "float", given["symmetric"], strategy, group_size, dynamic)


_FIELDS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "group_size": None,
    "strategy": None,
    "block_structure": None,
    "dynamic": False,
    "actorder": None,
    "scale_dtype": None,
    "zp_dtype": None,
    "observer": None,
    "observer_kwargs": None,
}


def _strategy(given: Any, group_size: int | None) -> str:
    if given is not None:
        return _word(given, "strategy", _STRATEGIES)
    if group_size is None:
        return "tensor"
    if group_size == 0:
        raise IllegalArgs("group_size is 0")
    return "group" if group_size > 0 else "channel"


def _refuse_combinations(
    strategy: str, group_size: int | None, dynamic: bool | str, given: Mapping[str, Any]
) -> None:
    grouped = strategy in ("group", "tensor_group")
    if grouped and (group_size is None or group_size <= 0):
        raise IllegalArgs(f"strategy {strategy} needs a positive group_size")
    if not grouped and group_size is not None and group_size > 0:
        raise IllegalArgs(f"group_size {group_size} does not go with strategy {strategy}")
    if strategy == "token" and not dynamic:
        raise IllegalArgs("strategy token needs dynamic: true")
    if dynamic and strategy not in _DYNAMIC_STRATEGIES:
        raise IllegalArgs(f"strategy {strategy} cannot be dynamic")
    if dynamic == "local" and strategy != "tensor_group":
        raise IllegalArgs(f"dynamic local goes with strategy tensor_group, not {strategy}")
    if strategy == "block" or given["block_structure"] is not None:
        raise IllegalArgs("blocks are for weights, not for a cache")
    if given["actorder"] not in (None, False):
        raise IllegalArgs("actorder is for weights, not for a cache")
    for key in ("scale_dtype", "zp_dtype"):
        if given[key] is not None:
            name = given[key].removeprefix("torch.") if isinstance(given[key], str) else ""
            if name not in _DTYPES:
                raise IllegalArgs(f"{key} is {given[key]!r}")
    if given["observer"] is not None and not isinstance(given["observer"], str):
        raise IllegalArgs(f"observer is {given['observer']!r}")
    if given["observer_kwargs"] is not None and not isinstance(given["observer_kwargs"], Mapping):
        raise IllegalArgs(f"observer_kwargs is {given['observer_kwargs']!r}")


def _word(value: Any, field: str, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value.lower() not in known:
        raise IllegalArgs(f"{field} is {value!r}; known are {', '.join(known)}")
    return value.lower()


def to_wish(args: QuantArgs, where: str) -> Wish:
    """Returns the format that these arguments describe, if Kvant has it; never a similar one."""

    def lacking(what: str, nearest: KVDtype | None) -> UnreadableWish:
        hint = "" if nearest is None else f"; the nearest is {nearest}, which has to be asked for"
        return UnreadableWish(where, str(args), f"Kvant has no {what}{hint}", nearest)

    nearest = _nearest(args)
    if not args.symmetric:
        return lacking("format with zero points from a checkpoint", nearest)
    if not args.is_float:
        return lacking(f"{args.num_bits}-bit integers per {args.strategy}", nearest)
    if args.num_bits == 8:
        if args.strategy in ("tensor", "attn_head") and not args.dynamic:
            return KVWish(KVDtype.FP8_E4M3, KVDtype.FP8_E4M3, where, ScalePromise.STATIC)
        when = "run-time" if args.dynamic else "static"
        return lacking(f"8-bit floats with {when} scales per {args.strategy}", nearest)
    if args.num_bits == 4:
        block = KVDtype.NVFP4.format.block
        if args.strategy != "tensor_group" or args.group_size != block:
            size = f" of {args.group_size}" if args.group_size else ""
            return lacking(f"4-bit floats with scales per {args.strategy}{size}", nearest)
        if args.dynamic is True:
            # Rows stored under one global scale cannot be read under the next one.
            return lacking("global scale that changes at run time", nearest)
        return KVWish(KVDtype.NVFP4, KVDtype.NVFP4, where, ScalePromise.STATIC)
    return lacking(f"{args.num_bits}-bit floats", nearest)


def _nearest(args: QuantArgs) -> KVDtype | None:
    by_kind = {
        (8, True): KVDtype.FP8_PER_TOKEN_HEAD,
        (8, False): KVDtype.INT8_PER_TOKEN_HEAD,
        (4, True): KVDtype.NVFP4,
        (4, False): KVDtype.INT4_PER_TOKEN_HEAD,
    }
    return by_kind.get((args.num_bits, args.is_float))
