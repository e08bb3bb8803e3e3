"""A rank's share of a model's heads and KV cache. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvant.kv.geometry import LayerGeometry, ModelGeometry, StateGeometry, StateKind
from kvant.kv.spec import KVPlan, LayerSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts of a model."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """Returns the range of KV heads that this rank stores. With fewer heads than ranks it is one head."""
        if num_kv_heads >= self.size:
            count = num_kv_heads // self.size
            return self.rank * count, (self.rank + 1) * count
        head = self.rank * num_kv_heads // self.size
        return head, head + 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The heads of a recurrent layer. Equal groups of them share a head of queries and keys.

    Mamba2 calls key heads groups. With fewer key heads than ranks, they are replicated.
    """

    heads: int
    key_heads: int
    values: int
    keys: int

    @property
    def value_width(self) -> int:
        return self.heads * self.values


def recurrence_of(layer: LayerGeometry) -> Recurrence | None:
    """Derives the heads from the shapes of a layer's states; None for a layer without recurrent heads."""
    shapes = {state.kind: state.shape for state in layer.states}
    matrix, conv = shapes.get(StateKind.RECURRENT), shapes.get(StateKind.CONV)
    if matrix is None or conv is None or len(matrix) != 3:
        return None
    heads, values, keys = matrix
    return Recurrence(heads, (conv[-1] - heads * values) // (2 * keys), values, keys)


def rank_layer(layer: LayerGeometry, size: int) -> LayerGeometry:
    """Returns each of `size` ranks' part of a layer. With fewer KV heads than ranks, they are replicated."""
    if size == 1:
        return layer
    layer = replace(layer, states=_rank_states(layer, size))
    if not layer.num_q_heads:
        return layer
    return replace(
        layer,
        num_q_heads=layer.num_q_heads // size,
        num_kv_heads=max(1, layer.num_kv_heads // size),
    )


def _rank_states(layer: LayerGeometry, size: int) -> tuple[StateGeometry, ...]:
    """Divides a layer's states by heads, or by channels if each channel has a separate state."""
    found = recurrence_of(layer)

    def shape_of(state: StateGeometry) -> tuple[int, ...]:
        if state.kind is StateKind.RECURRENT:
            return (state.shape[0] // size, *state.shape[1:])
        if found is None:
            return (*state.shape[:-1], state.shape[-1] // size)
        keys = 2 * max(1, found.key_heads // size) * found.keys
        return (*state.shape[:-1], keys + found.value_width // size)

    return tuple(replace(state, shape=shape_of(state)) for state in layer.states)


def rank_geometry(geometry: ModelGeometry, size: int) -> ModelGeometry:
    """Returns each of `size` ranks' part of a model's layers."""
    if size == 1:
        return geometry
    return replace(geometry, layers=tuple(rank_layer(layer, size) for layer in geometry.layers))


def rank_plan(plan: KVPlan, size: int) -> KVPlan:
    """Returns each of `size` ranks' part of a whole model's plan."""
    if size == 1:
        return plan
    return replace(plan, layers=tuple(_rank_spec(spec, size) for spec in plan.layers))


def _rank_spec(spec: LayerSpec, size: int) -> LayerSpec:
    layer = rank_layer(spec.geometry, size)
    states = zip(spec.states, layer.states, strict=True) if spec.states else ()
    cut = tuple(replace(state, geometry=of_rank) for state, of_rank in states)
    return replace(spec, geometry=layer, states=cut)
