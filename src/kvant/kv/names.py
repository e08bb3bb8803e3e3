"""The only reader of format names.

A format request is one name for both K and V, or `K/V`: "fp8", "fp8/int4_per_token_head", "auto".
A few names are short for a pair: `kvant.kv.dtype.PAIR_NAMES`. Where one side alone can be asked for, it is
`k=F` or `v=F`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvant.errors import BadValue, NotServable, UnknownName, WayOut
from kvant.kv.dtype import PAIR_NAMES, ComputeDtype, Follow, KVDtype

Request = KVDtype | Follow

_BY_NAME: dict[str, Request] = {follow.value: follow for follow in Follow}
for _dtype in KVDtype:
    if not _dtype.format.device_only:  # users ask for a format, its device chooses the encoding
        for _name in (_dtype.format.name, *_dtype.format.aliases):
            _BY_NAME[_name] = _dtype

_FED_BACK = frozenset({"int8_feedback", "int8_error_feedback"})
"""Names of a format that was measured and not kept: docs/decisions.md, "Recurrent states"."""

_COMPUTE = {
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class FormatRequest:
    """What was asked for K and for V."""

    k: Request
    v: Request

    def __str__(self) -> str:
        k, v = str(self.k), str(self.v)
        return k if k == v else f"{k}/{v}"


@dataclass(frozen=True, slots=True)
class SideRequests:
    """What was asked for K, for V, or for both. None: this side was not named."""

    k: Request | None
    v: Request | None

    def __str__(self) -> str:
        if self.k is not None and self.v is not None:
            return str(FormatRequest(self.k, self.v))
        return ",".join(f"{s}={f}" for s, f in (("k", self.k), ("v", self.v)) if f is not None)

    @property
    def named(self) -> tuple[Request, ...]:
        """What was asked for the sides that were named."""
        return tuple(side for side in (self.k, self.v) if side is not None)


def known_names() -> tuple[str, ...]:
    """Returns every name that `parse_format` reads, each once, requests first and pairs last."""
    return tuple(dict.fromkeys((*_BY_NAME, *PAIR_NAMES)))


def whole_formats() -> tuple[FormatRequest, ...]:
    """Returns every format that any checkpoint can be stored in; halves of named pairs come as their pairs.

    Formats that need matrices from the checkpoint are left out.
    """
    pairs = [FormatRequest(k, v) for k, v in PAIR_NAMES.values() if not k.format.takes_rounding]
    halves = {dtype for pair in pairs for dtype in (pair.k, pair.v)}
    alone = [
        dtype
        for dtype in KVDtype
        if dtype not in halves and not dtype.format.device_only and not dtype.format.takes_rounding
    ]
    return (*(FormatRequest(dtype, dtype) for dtype in alone), *pairs)


def parse_one(text: str, *, asked_by: str) -> Request:
    """One name without a slash; UnknownName suggests the nearest. NotServable: a format that was not kept."""
    name = text.strip().lower()
    if name in _FED_BACK:
        raise NotServable(
            f"{asked_by}: Kvant does not store int8 with error feedback",
            why="it was measured in recurrent states only: errors that elements hand to the next doubled the "
            "KL divergence of gated delta nets, and errors that elements keep take the bytes of bfloat16 "
            "(docs/decisions.md)",
            ways_out=(
                WayOut(f"take {KVDtype.INT8_PER_TOKEN_HEAD}, with the same bytes"),
                WayOut(f"take {KVDtype.BFLOAT16}, which is closer to exact numbers"),
            ),
        )
    found = _BY_NAME.get(name)
    if found is None:
        if name in PAIR_NAMES:
            k, v = PAIR_NAMES[name]
            raise BadValue(
                f"{asked_by}: {name} is a format of K and another of V",
                why="this option takes the format of one side",
                ways_out=(WayOut(f"write {k} for K, {v} for V"),),
            )
        raise UnknownName("KV cache format", text, known_names(), asked_by=asked_by)
    return found


def parse_format(text: str, *, asked_by: str) -> FormatRequest:
    """`F` or `K/V`. asked_by names the flag, file or field, for the error message."""
    parts = text.split("/")
    if len(parts) > 2 or not all(part.strip() for part in parts):
        raise BadValue(
            f"{asked_by}: {text!r} is no KV cache format",
            why="a format is one name, or K/V with one slash, such as fp8/int4_per_token_head",
        )
    pair = PAIR_NAMES.get(text.strip().lower())
    if pair is not None:
        return FormatRequest(*pair)
    k = parse_one(parts[0], asked_by=asked_by)
    return FormatRequest(k, parse_one(parts[1], asked_by=asked_by) if len(parts) == 2 else k)


def parse_sides(text: str, *, asked_by: str) -> SideRequests:
    """`F`, `K/V`, or one side alone: `k=F` or `v=F`. asked_by: as in `parse_format`."""
    side, found, name = text.partition("=")
    if not found:
        both = parse_format(text, asked_by=asked_by)
        return SideRequests(both.k, both.v)
    side = side.strip().lower()
    if side not in ("k", "v"):
        raise BadValue(
            f"{asked_by}: {text!r} names no side",
            why="it is F, K/V, k=F for keys or v=F for values",
        )
    if any(mark in name for mark in "/,="):
        raise BadValue(
            f"{asked_by}: {text!r} names more than one format",
            why=f"{side}=F stores one side wide, in one format",
            ways_out=(WayOut("name both sides as K/V, such as bfloat16/int8_per_token_head"),),
        )
    one = parse_one(name, asked_by=asked_by)
    return SideRequests(one, None) if side == "k" else SideRequests(None, one)


def parse_compute_dtype(text: str, *, asked_by: str) -> ComputeDtype | None:
    """The dtype a model computes in ("bfloat16", "bf16", ...); None for `auto`."""
    if text == Follow.CHECKPOINT.value:
        return None
    name = text.strip().lower()
    name = _COMPUTE.get(name, name)
    try:
        return ComputeDtype(name)
    except ValueError:
        known = [dtype.value for dtype in ComputeDtype] + list(_COMPUTE)
        raise UnknownName("dtype", text, known, asked_by=asked_by) from None
