"""The shape of a model as the KV cache sees it: one `LayerGeometry` per decoder layer.

It holds only facts that storage, planning and attention need. `kvant.models.geometry` reads them from
a config.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from kvant.kv.dtype import ComputeDtype


class Attention(Enum):
    """A layer's kind of attention; values are those of `kvant plan`'s JSON."""

    FULL = "full"
    SLIDING = "sliding"
    NONE = "none"  # recurrent or other layers that keep no KV
    SHARED = "shared"  # reads another layer's KV
    MLA = "mla"  # one latent instead of K and V


class StateKind(Enum):
    """What a state of a sequence is; values are those of `kvant plan`'s JSON."""

    CONV = "conv"  # the last inputs of a causal convolution
    RECURRENT = "recurrent"  # what a recurrence carries from token to token


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """A state that a layer keeps for each sequence; its size does not depend on the length.

    shape: of one sequence's state. A format with scales has one per row, the last dimension:
    (kernel - 1, channels) of a convolution, (heads, values, keys) of a gated delta net or Mamba2.
    """

    kind: StateKind
    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One decoder layer.

    index: global layer index, layers without KV counted.
    name: path of its attention module, such as "model.layers.0.self_attn".
    window: tokens a query sees, itself included; None for all.
    head_dim_k, head_dim_v: numbers in a row of K and of V. For MLA a row of K is the latent and the
        rotary key; no V is stored, because the latent, the row's first head_dim_v numbers, is the value.
    shared_with: the layer whose KV this one reads, for Attention.SHARED.
    sinks: the layer has learned attention sinks. softcap: its score cap, 0 for none.
    causal: False for a block-diffusion drafter's bidirectional layers.
    states: what it keeps for each sequence beside or instead of KV.
    """

    index: int
    name: str
    attention: Attention
    num_q_heads: int = 0
    num_kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    window: int | None = None
    shared_with: int | None = None
    sinks: bool = False
    softcap: float = 0.0
    causal: bool = True
    states: tuple[StateGeometry, ...] = ()

    @property
    def has_kv(self) -> bool:
        """True if this layer owns storage."""
        return self.attention in (Attention.FULL, Attention.SLIDING, Attention.MLA)


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A whole model.

    architecture: the config's `architectures[0]`, else its model_type.
    dtype: dtype of the weights by the config.
    max_model_len: the longest context its positions allow, None where the config has no limit.
    not_runnable: why Kvant can plan this model but not run it yet, or None.
    state_dtype: the dtype that the config wishes for recurrent states, as it names it.
    """

    architecture: str
    model_type: str
    layers: tuple[LayerGeometry, ...]
    dtype: ComputeDtype
    vocab_size: int
    hidden_size: int
    max_model_len: int | None
    not_runnable: str | None = None
    state_dtype: str | None = None

    @property
    def fingerprint(self) -> str:
        """Stable short hash of architecture and shape: equal for fine-tunes of one model."""
        facts = [
            self.architecture, self.vocab_size, self.hidden_size,
            [_facts(layer) for layer in self.layers],
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def has_states(self) -> bool:
        """Whether a sequence keeps more than KV."""
        return any(layer.states for layer in self.layers)


def _facts(layer: LayerGeometry) -> dict[str, Any]:
    """Returns a layer as JSON."""
    facts = {**asdict(layer), "attention": layer.attention.value}
    del facts["states"]
    if layer.states:
        facts["states"] = [[state.kind.value, *state.shape] for state in layer.states]
    return facts


def spans(indices: Iterable[int]) -> str:
    """Returns ascending indices as ranges: 0, 1, 2, 5 becomes "0-2, 5"."""
    found: list[list[int]] = []
    for index in indices:
        if found and found[-1][1] == index - 1:
            found[-1][1] = index
        else:
            found.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
