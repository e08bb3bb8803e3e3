"""What the readers of checkpoint dialects produce: facts, not decisions.

A checkpoint may wish for a format (globally, or layer by layer) and may bring scales. Whether a
wish is followed is `kvant.kv.resolve`'s business; a wish that cannot be read is kept as such,
because an explicit request makes it irrelevant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.spec import ScaleTensor


class ScalePromise(Enum):
    """What the declaration says about scale tensors."""

    STATIC = "static"  # the file promises them: missing is an error
    CAST = "cast"  # scale 1.0 on purpose, no tensors expected
    NONE = "none"  # the format makes its own, row by row


@dataclass(frozen=True, slots=True)
class KVWish:
    """A readable wish.

    where: file and key, such as "config.json: quantization_config.kv_cache_scheme". A side is None
    where the checkpoint says nothing about it or asks for the model dtype.
    """

    k: KVDtype | None
    v: KVDtype | None
    where: str
    promise: ScalePromise


@dataclass(frozen=True, slots=True)
class UnreadableWish:
    """A wish that Kvant cannot read or has no format for.

    asked: the text; why: what is wrong with it. nearest: the most similar format, which must be
    asked for by name, if there is one.
    """

    where: str
    asked: str
    why: str
    nearest: KVDtype | None = None


Wish = KVWish | UnreadableWish


@dataclass(frozen=True, slots=True)
class CheckpointKV:
    """All that a checkpoint says about its KV cache.

    scheme: the global wish, or None. per_layer: wishes by attention module name; a layer that is
    not in a non-empty map wishes for the model dtype. scales: by (module name, side). checked:
    whether weight files were there to look for scales; without them every scale is "unchecked".
    rounding: matrices for formats with feedback, by attention module.
    notes: what a reader of the plan should know (scales that no option asked for, lone files). ignored:
    tensors that belong to KV or attention quantisation and that nothing here uses, as "name: why
    not".
    """

    scheme: Wish | None = None
    per_layer: Mapping[str, Wish] = field(default_factory=lambda: MappingProxyType({}))
    scales: Mapping[tuple[str, Side], ScaleTensor] = field(
        default_factory=lambda: MappingProxyType({})
    )
    checked: bool = False
    rounding: Mapping[str, ScaleTensor] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
