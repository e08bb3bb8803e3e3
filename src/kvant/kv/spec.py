"""The result of resolution: one frozen `LayerSpec` per layer, together a `KVPlan`.

Nothing writes to a plan. Code that needs the stored format reads the layer's spec; there is no
global format.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Plane, Side
from kvant.kv.geometry import LayerGeometry, StateGeometry, StateKind


class Source(Enum):
    """Who decided."""

    EXPLICIT = "explicit"
    SKIP = "skip"
    FORMAT_DEFAULT = "format-default"
    CHECKPOINT = "checkpoint"
    MODEL = "model"
    DOWNGRADE = "downgrade"


class ScaleState(Enum):
    NONE = "none"  # the format has no scale from outside
    FOUND = "found"  # a tensor of the checkpoint is used
    UNCALIBRATED = "uncalibrated"  # 1.0 or a fixed value, not measured for this model
    CAST = "cast"  # 1.0 by the checkpoint's recipe
    MISSING = "missing"  # promised, missing, and the user accepted 1.0
    UNUSED = "unused"  # present, but the stored format does not use it
    UNCHECKED = "unchecked"  # there are no weight files to look into


@dataclass(frozen=True, slots=True)
class ScaleTensor:
    """A scale found in a safetensors header; its value has not been read.

    name: the tensor's name; file: the file that holds it; shape, dtype: as in the header ("F32").
    layer: name of the attention module it belongs to, such as "model.layers.0.self_attn".
    inverse: it holds 1 / scale (compressed-tensors' global scales). rivals: other tensors that claim
    to be the same scale. One tensor may stand for K and for V (`kv_scale`).
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    layer: str
    side: Side
    inverse: bool = False
    rivals: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True, slots=True)
class Scale:
    """Where the scale of one side of one layer comes from.

    tensor: the checkpoint's tensor, for FOUND and UNUSED. factor: multiplies its value before use (2 if
    e4m3fn scales serve e4m3fnuz codes). fixed: the value if no tensor is used.
    because: one phrase for the reader of the plan.
    """

    state: ScaleState
    tensor: ScaleTensor | None = None
    factor: float = 1.0
    fixed: float = 1.0
    because: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The format of one side of one layer, who decided it, and what else was considered."""

    dtype: KVDtype
    source: Source
    because: str
    considered: tuple[str, ...]
    scale: Scale


@dataclass(frozen=True, slots=True)
class WideRows:
    """Rows of a layer that are stored a second time, in wider formats: the first and the latest tokens'.

    A query at position i reads key j from them where j < sink or i - j < recent, else from the layer's pages.
    k, v: at least one. The other side is stored there in the layer's own format.
    """

    k: Choice | None
    v: Choice | None
    sink: int
    recent: int

    @property
    def sides(self) -> dict[Side, Choice]:
        """The sides that are wide."""
        sides = ((Side.K, self.k), (Side.V, self.v))
        return {side: choice for side, choice in sides if choice is not None}

    @property
    def because(self) -> str:
        """Who decided."""
        return next(iter(self.sides.values())).because

    def __str__(self) -> str:
        stored = "/".join(dict.fromkeys(str(choice.dtype) for choice in self.sides.values()))
        first = f"first {self.sink} and " if self.sink else ""
        whose = "" if len(self.sides) > 1 else f" of {next(iter(self.sides)).value.upper()}"
        return f"{first}last {self.recent}{whose} in {stored}"


@dataclass(frozen=True, slots=True)
class Rejected:
    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of a layer and the format that stores it."""

    geometry: StateGeometry
    choice: Choice

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Arrays of the storage; widths are per row of the state."""
        return self.choice.dtype.format.planes(self.geometry.shape[-1])

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane for one sequence."""
        return tuple(self.geometry.num_rows * plane.row_bytes for plane in self.planes)

    @property
    def bytes_per_sequence(self) -> int:
        return sum(self.plane_bytes)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its geometry, what is stored, and which backend writes and reads it.

    k and v are None where the layer owns no such storage (no KV, shared, MLA's V).
    states: in the order of `geometry.states`. wide: rows that are stored a second time, or None.
    """

    geometry: LayerGeometry
    k: Choice | None
    v: Choice | None
    backend: str | None
    rejected: tuple[Rejected, ...] = ()
    states: tuple[StateSpec, ...] = ()
    wide: WideRows | None = None

    @property
    def wide_spec(self) -> LayerSpec | None:
        """The layer as its wide rows are stored: in pages of their own, by the same backend."""
        if self.wide is None:
            return None
        k, v = self.wide.k or self.k, self.wide.v or self.v
        return replace(self, k=k, v=v, states=(), wide=None)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that every running sequence takes in this layer, at any length."""
        return sum(state.bytes_per_sequence for state in self.states)

    def state(self, kind: StateKind) -> StateSpec | None:
        return next((one for one in self.states if one.geometry.kind is kind), None)

    @property
    def planes(self) -> tuple[tuple[str, Plane], ...]:
        """Every array of this layer's storage as ("k.codes", plane); widths are per token and KV head."""
        found: list[tuple[str, Plane]] = []
        for side, choice, head_dim in (
            ("k", self.k, self.geometry.head_dim_k),
            ("v", self.v, self.geometry.head_dim_v),
        ):
            if choice is not None:
                found += [(f"{side}.{p.name}", p) for p in choice.dtype.format.planes(head_dim)]
        return tuple(found)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of this layer. Plan, pool and reports all use this number."""
        return self.geometry.num_kv_heads * sum(plane.row_bytes for _, plane in self.planes)

    @property
    def bytes_per_token_16bit(self) -> int:
        """Bytes per token of the same layer with 16-bit K and V."""
        g = self.geometry
        if self.k is None:
            return 0
        return 2 * g.num_kv_heads * (g.head_dim_k + (g.head_dim_v if self.v is not None else 0))


class Role(Enum):
    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class KVPlan:
    """What every layer of one model stores."""

    role: Role
    model: str
    compute_dtype: ComputeDtype
    compute_because: str
    page_size: int
    layers: tuple[LayerSpec, ...]
    warnings: tuple[str, ...] = ()

    @property
    def formats(self) -> dict[str, int]:
        """How many layers store each format, or pair K/V, the most frequent first."""
        counts: Counter[str] = Counter()
        for layer in self.layers:
            if layer.k is not None:
                sides = (layer.k, layer.k if layer.v is None else layer.v)
                counts["/".join(dict.fromkeys(str(side.dtype) for side in sides))] += 1
        return dict(counts.most_common())

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_token_16bit(self) -> int:
        return sum(layer.bytes_per_token_16bit for layer in self.layers)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of states that every running sequence takes."""
        return sum(layer.bytes_per_sequence for layer in self.layers)

    @property
    def has_states(self) -> bool:
        return any(layer.states for layer in self.layers)

    @property
    def has_wide_rows(self) -> bool:
        return any(layer.wide is not None for layer in self.layers)

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.bytes_per_token

    @property
    def fingerprint(self) -> str:
        """Stable hash of everything that decides what the stored bytes mean.

        Geometry, format identity and scale of every layer; not who decided, nor which backend reads.
        """
        facts: list[Any] = [
            [
                layer.geometry.index,
                layer.geometry.num_kv_heads,
                layer.geometry.head_dim_k,
                layer.geometry.head_dim_v,
                layer.geometry.shared_with,
                *(
                    None
                    if choice is None
                    else [
                        choice.dtype.format.fingerprint,
                        choice.scale.tensor.name
                        if choice.scale.tensor and choice.scale.state is ScaleState.FOUND
                        else choice.scale.fixed,
                        choice.scale.factor,
                    ]
                    for choice in (layer.k, layer.v)
                ),
            ]
            for layer in self.layers
        ]
        states = [
            [layer.geometry.index, state.geometry.kind.value, state.choice.dtype.format.fingerprint]
            for layer in self.layers
            for state in layer.states
        ]
        if states:
            facts.append(states)
        facts += [
            [
                layer.geometry.index,
                layer.wide.sink,
                layer.wide.recent,
                *(
                    None if choice is None else choice.dtype.format.fingerprint
                    for choice in (layer.wide.k, layer.wide.v)
                ),
            ]
            for layer in self.layers
            if layer.wide is not None
        ]
        text = json.dumps([self.page_size, self.compute_dtype.value, facts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]
