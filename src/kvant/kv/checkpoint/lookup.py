"""Find what the checkpoint says about a layer, with any prefix on either side.

The same text layer is "model.layers.3.self_attn" in one place and
"language_model.model.layers.3.self_attn" in another. Two names mean the same layer when the index
is the same, the attention module has the same kind, and the prefixes are equal without the words
that every text model may have. "vision_tower.", "mtp." and "draft."
are not among those words, so a vision tower's or a drafter's layer 3 is never mistaken for the text
model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from kvant.kv.checkpoint.facts import CheckpointKV, KVWish, UnreadableWish, Wish
from kvant.kv.checkpoint.scales import ATTENTION_MODULES
from kvant.kv.format import Side
from kvant.kv.geometry import LayerGeometry
from kvant.kv.spec import ScaleTensor

LAYER_LISTS = frozenset({"layers", "h", "blocks", "block", "layer"})
"""What architectures call the list of their layers."""

TEXT_PREFIXES = frozenset(
    {"model", "language_model", "text_model", "language", "llm", "lm", "transformer", "decoder",
     "backbone", "base_model", "thinker"}
)  # fmt: skip
"""Words before that list that every text model may have."""


@dataclass(frozen=True, slots=True)
class Place:
    """A module's location. owner: the rest of the prefix, () for the text model."""

    owner: tuple[str, ...]
    index: int
    module: str


@lru_cache(maxsize=4096)
def read_place(name: str) -> Place | None:
    """Returns the place that a module's name states, or None where it names no numbered layer."""
    parts = name.split(".")
    for at in range(len(parts) - 2):
        number = parts[at + 1]
        if parts[at] in LAYER_LISTS and number.isascii() and number.isdigit() and len(number) < 7:
            owner = tuple(part for part in parts[:at] if part not in TEXT_PREFIXES)
            module = ".".join(parts[at + 2 :])
            return Place(owner, int(number), "attention" if module in ATTENTION_MODULES else module)
    return None


def same_layer(a: str, b: str) -> bool:
    """Returns whether two module names mean the same layer."""
    return a == b or (read_place(a) is not None and read_place(a) == read_place(b))


def wish_for(checkpoint: CheckpointKV, layer: LayerGeometry) -> Wish | None:
    """Returns what the checkpoint wishes for this layer; None for no wish, which is the model dtype.

    If there is a map, a layer that it omits has no wish.
    """
    if not checkpoint.per_layer:
        return checkpoint.scheme
    if layer.name in checkpoint.per_layer:
        return checkpoint.per_layer[layer.name]
    found = {n: w for n, w in checkpoint.per_layer.items() if same_layer(n, layer.name)}
    if len({_sides(wish) for wish in found.values()}) > 1:
        names = " and ".join(found)
        return UnreadableWish(
            where=next(iter(found.values())).where,
            asked="two formats for one layer",
            why=f"{names} both mean {layer.name} and disagree",
        )
    return next(iter(found.values()), None)


def scale_for(checkpoint: CheckpointKV, layer: LayerGeometry, side: Side) -> ScaleTensor | None:
    """Returns the scale tensor of one side of this layer; `rivals` names others that claim to be it."""
    exact = checkpoint.scales.get((layer.name, side))
    if exact is not None:
        return exact
    found = [
        tensor
        for (name, at), tensor in checkpoint.scales.items()
        if at is side and same_layer(name, layer.name)
    ]
    if not found:
        return None
    first, *others = found
    return replace(first, rivals=(*first.rivals, *(tensor.name for tensor in others)))


def unclaimed(checkpoint: CheckpointKV, layers: Iterable[LayerGeometry]) -> tuple[str, ...]:
    """Wishes and scales that belong to none of `layers`, one line each.

    A per-layer map that matches nothing would otherwise look like a checkpoint without wishes.
    """
    owning = [layer.name for layer in layers if layer.has_kv]
    lines = [
        f"{wish.where} has an entry for {name}, which is no layer with KV of this model"
        for name, wish in checkpoint.per_layer.items()
        if not any(same_layer(name, layer) for layer in owning)
    ]
    strays: dict[str, list[str]] = {}
    for (name, _), tensor in checkpoint.scales.items():
        if not any(same_layer(name, layer) for layer in owning):
            place = read_place(name)
            group = ".".join(place.owner) if place is not None and place.owner else name
            names = strays.setdefault(group, [])
            if tensor.name not in names:
                names.append(tensor.name)
    for group, names in strays.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(
            f"scale {names[0]}{more} ({group}) belongs to no layer with KV of this model: not used"
        )
    return tuple(lines)


def _sides(wish: Wish) -> object:
    return (wish.k, wish.v) if isinstance(wish, KVWish) else (wish.asked, wish.why)
