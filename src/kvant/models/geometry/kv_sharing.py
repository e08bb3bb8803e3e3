"""Layers that read another layer's KV (Gemma 3n and 4).

The last `num_kv_shared_layers` layers have no keys and values of their own: each reads those of the
last layer before them of its own type (transformers: `kv_sharing_modes`, `shared_kv_states`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvant.models.geometry.fields import MAX_LAYERS, Fields
from kvant.models.geometry.windows import LayerType


def sources(fields: Fields, kinds: Sequence[LayerType]) -> tuple[int | None, ...]:
    """For each layer the layer whose KV it reads, None for its own."""
    name = "num_kv_shared_layers"
    shared = fields.optional_integer(name, least=0, most=MAX_LAYERS) or 0
    first = len(kinds) - shared
    if first < 1:
        raise fields.bad(name, f"of {len(kinds)} layers at least one must have KV of its own")
    if shared and set(kinds[:first]) != set(kinds):
        raise fields.bad(name, "a type of layer reads KV that no layer before them writes")
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    return tuple(None if index < first else last[kind] for index, kind in enumerate(kinds))
