"""A rank's share of a model's heads and KV cache. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvant.kv.geometry import LayerGeometry, ModelGeometry
from kvant.kv.spec import KVPlan


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts of a model."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """The range of KV heads that this rank stores; one head that others store too if there are few."""
        if num_kv_heads >= self.size:
            count = num_kv_heads // self.size
            return self.rank * count, (self.rank + 1) * count
        head = self.rank * num_kv_heads // self.size
        return head, head + 1


WHOLE = Shard()


def rank_layer(layer: LayerGeometry, size: int) -> LayerGeometry:
    """A layer as each of `size` ranks computes it. KV heads fewer than ranks are replicated."""
    if size == 1 or not layer.num_q_heads:
        return layer
    return replace(
        layer,
        num_q_heads=layer.num_q_heads // size,
        num_kv_heads=max(1, layer.num_kv_heads // size),
    )


def rank_geometry(geometry: ModelGeometry, size: int) -> ModelGeometry:
    """A model's layers as each of `size` ranks computes them."""
    if size == 1:
        return geometry
    return replace(geometry, layers=tuple(rank_layer(layer, size) for layer in geometry.layers))


def rank_plan(plan: KVPlan, size: int) -> KVPlan:
    """What each of `size` ranks stores of a whole model's plan."""
    if size == 1:
        return plan
    layers = (replace(spec, geometry=rank_layer(spec.geometry, size)) for spec in plan.layers)
    return replace(plan, layers=tuple(layers))
