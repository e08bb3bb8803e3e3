"""Reads which layers see a window of the past, and its width.

In transformers a query at position q sees positions above q - sliding_window, in all families
(masking_utils.sliding_window_overlay). So `sliding_window` is the number of tokens seen, the
query's own included: exactly `LayerGeometry.window`. Families differ only in which layers have one,
and in whether `use_sliding_window` switches it off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from kvant.models.geometry.fields import MAX_LAYERS, MAX_TOKENS, Fields


class LayerType(Enum):
    """Kinds of layers, by transformers' names."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    LINEAR = "linear_attention"  # recurrent state, no KV


_LEGACY = {"attention": LayerType.FULL, "mamba": LayerType.LINEAR}  # transformers renames these


def num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", most=MAX_LAYERS)


def every_layer(fields: Fields, *, switched: bool = False) -> tuple[int | None, ...]:
    """Returns one window for all layers, None without sliding_window.

    switched: use_sliding_window must be true for it to count.
    """
    window = read_window(fields)
    if switched and not fields.flag("use_sliding_window"):
        window = None
    return (window,) * num_layers(fields)


def read_window(fields: Fields, name: str = "sliding_window") -> int | None:
    """Returns a window in tokens. 0 would hide even the token itself, so it means no window."""
    if fields.is_null(name):
        return None  # a missing one is the class's default
    return fields.optional_integer(name, most=MAX_TOKENS)


def read_layer_types(
    fields: Fields,
    default: Iterable[LayerType],
    *,
    allowed: Sequence[LayerType] = (LayerType.FULL, LayerType.SLIDING),
) -> tuple[LayerType, ...]:
    """Returns `layer_types`, one per layer, else the family's default."""
    words = fields.words("layer_types")
    if words is None:
        return tuple(default)
    count = num_layers(fields)
    if len(words) != count:
        raise fields.bad("layer_types", f"it has {len(words)} entries for {count} layers")
    known = {kind.value: kind for kind in LayerType} | _LEGACY
    kinds = []
    for word in words:
        kind = known.get(word)
        if kind is None or kind not in allowed:
            raise fields.bad(
                "layer_types",
                f"{word!r} is none of {', '.join(a.value for a in allowed)}",
            )
        kinds.append(kind)
    return tuple(kinds)


def full_every(
    fields: Fields, n: int, other: LayerType = LayerType.SLIDING
) -> tuple[LayerType, ...]:
    """Returns `layer_types`, else full layers at indices n-1, 2n-1, .. and `other` ones between them."""
    count = num_layers(fields)
    default = (other if (index + 1) % n else LayerType.FULL for index in range(count))
    return read_layer_types(fields, default, allowed=(LayerType.FULL, other))


def windows_of(
    fields: Fields, kinds: Sequence[LayerType], window: int | None
) -> tuple[int | None, ...]:
    """Returns one window per layer. Raises BadCheckpoint if a sliding layer has none."""
    if window is None and LayerType.SLIDING in kinds:
        raise fields.bad("sliding_window", "layer_types has sliding layers, so there must be one")
    return tuple(window if kind is LayerType.SLIDING else None for kind in kinds)


def kv_sources(fields: Fields, kinds: Sequence[LayerType]) -> tuple[int | None, ...]:
    """Returns for each layer the layer whose KV it reads, None for its own (Gemma 3n and 4).

    The last `num_kv_shared_layers` layers have no keys and values of their own: each reads those of
    the last layer before them of its own type (transformers: `kv_sharing_modes`).
    """
    name = "num_kv_shared_layers"
    shared = fields.optional_integer(name, least=0, most=MAX_LAYERS) or 0
    first = len(kinds) - shared
    if first < 1:
        raise fields.bad(name, f"of {len(kinds)} layers at least one must have KV of its own")
    if shared and set(kinds[:first]) != set(kinds):
        raise fields.bad(name, "a type of layer reads KV that no layer before them writes")
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    return tuple(None if index < first else last[kind] for index, kind in enumerate(kinds))
