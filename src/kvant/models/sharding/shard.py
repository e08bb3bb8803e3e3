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
        """The range of KV heads that this rank stores; one head that others store too if there are few."""
        if num_kv_heads >= self.size:
            count = num_kv_heads // self.size
            return self.rank * count, (self.rank + 1) * count
        head = self.rank * num_kv_heads // self.size
        return head, head + 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The heads of a recurrent layer, and of the queries and keys that they share in equal parts.

    Mamba2 calls the latter groups. Heads of keys fewer than ranks are replicated.
    """

    heads: int
    key_heads: int
    values: int
    keys: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.keys

    @property
    def value_width(self) -> int:
        return self.heads * self.values


def recurrence_of(layer: LayerGeometry) -> Recurrence | None:
    """The heads that the states of a layer tell; None for a layer without a recurrence by heads."""
    shapes = {state.kind: state.shape for state in layer.states}
    matrix, conv = shapes.get(StateKind.RECURRENT), shapes.get(StateKind.CONV)
    if matrix is None or conv is None or len(matrix) != 3:
        return None
    heads, values, keys = matrix
    return Recurrence(heads, (conv[-1] - heads * values) // (2 * keys), values, keys)


def rank_layer(layer: LayerGeometry, size: int) -> LayerGeometry:
    """A layer as each of `size` ranks computes it. KV heads fewer than ranks are replicated."""
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
    """By heads, or by channels where each channel has a state of its own."""
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
    """A model's layers as each of `size` ranks computes them."""
    if size == 1:
        return geometry
    return replace(geometry, layers=tuple(rank_layer(layer, size) for layer in geometry.layers))


def rank_plan(plan: KVPlan, size: int) -> KVPlan:
    """What each of `size` ranks stores of a whole model's plan."""
    if size == 1:
        return plan
    return replace(plan, layers=tuple(_rank_spec(spec, size) for spec in plan.layers))


def _rank_spec(spec: LayerSpec, size: int) -> LayerSpec:
    layer = rank_layer(spec.geometry, size)
    states = zip(spec.states, layer.states, strict=True) if spec.states else ()
    cut = tuple(replace(state, geometry=of_rank) for state, of_rank in states)
    return replace(spec, geometry=layer, states=cut)
