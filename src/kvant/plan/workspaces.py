"""Counts the memory that a GPU needs beside weights and pages, before anything is loaded.

Every number follows from the model's shape and the limits, so `kvant plan` can show it for a device that is
not in this machine. docs/benchmarks/memory.md compares it with an H200.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvant.attention.need import FIXED_SPLIT, MOST_PARTS
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import LayerGeometry, ModelGeometry, StateKind
from kvant.models.geometry.fields import text_section
from kvant.models.weights import ELEMENT_BYTES
from kvant.plan.graph_sizes import MOST_PIECES, draft_sizes
from kvant.plan.limits import Limits

RUNTIME_BYTES = 1024 * 2**20
"""Bytes of the driver's context, compiled kernels, and the libraries' own workspaces."""

FRAGMENTS = 1.25
"""Factor by which an allocator's memory for steps of varying sizes exceeds the need of one step."""


_IN_TWO_LAUNCHES = frozenset(
    {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"}
)
"""Model types whose recurrence over prompts is `delta_chunks`, for heads of at most `_WIDEST` numbers."""

_WIDEST = 128


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Bytes of a GPU beside weights and pages. runtime: the driver, kernels and libraries. step: activations
    of the largest step. logits: rows of logits of the sampler and of graphs. prompts: decoded keys and values
    of a long prompt, and partial results of its attention.
    """

    runtime: int
    step: int
    logits: int
    prompts: int

    @property
    def total(self) -> int:
        return self.runtime + self.step + self.logits + self.prompts


def workspaces(
    geometry: ModelGeometry,
    config: Mapping[str, Any],
    compute: ComputeDtype,
    limits: Limits,
    draft_counts: Sequence[int] = (),
    *,
    batch_invariant: bool = False,
    forward_bytes: int = 0,
) -> Workspaces:
    """Returns the workspaces of a GPU. config: the model's config.json. draft_counts: as in `Plan`.
    forward_bytes: bytes that the forward allocates for itself.
    """
    element = ELEMENT_BYTES[compute]
    layers = [layer for layer in geometry.layers if layer.num_q_heads]
    q = max((g.num_q_heads * max(g.head_dim_k, g.head_dim_v) for g in layers), default=0)
    kv = max((g.num_kv_heads * (g.head_dim_k + g.head_dim_v) for g in layers), default=0)
    # Elements of one token at the widest place: residual, its norm, input and output of attention, and
    # the two sides of the gated product beside their result.
    wide = 3 * geometry.hidden_size + 2 * (q + kv) + q + 3 * _intermediate(config, geometry)
    wide += (
        _experts_of_a_token(config) * geometry.hidden_size
    )  # their results, before they are summed
    wide *= element
    activations = limits.max_num_batched_tokens * max(wide, _recurrent_bytes(geometry, element))
    # Recorded steps with pieces of prompts have activations of their own.
    activations += min(limits.max_num_batched_tokens, MOST_PIECES) * wide
    # The model's logits and their float32 copy, for the step with most rows. Twice, since recorded steps
    # share a buffer of their own.
    with_drafts = (
        (1 + n) * size for n in draft_counts for size in draft_sizes(n, limits.max_num_seqs)
    )
    rows = max([limits.max_num_seqs, *with_drafts]) * (2 * element + 2 * 4)
    # Keys and values decoded once per prompt; queries, their padded copy and the product; float32 parts.
    decoded = limits.max_model_len * kv * element
    parts = limits.max_num_batched_tokens * q * (3 * element + 2 * 4)
    if batch_invariant:
        parts += max((_fixed_parts(layer, limits) for layer in layers), default=0)
    return Workspaces(
        runtime=RUNTIME_BYTES + forward_bytes,
        step=int(FRAGMENTS * activations),
        logits=geometry.vocab_size * rows,
        prompts=int(FRAGMENTS * (decoded + parts)),
    )


def _recurrent_bytes(geometry: ModelGeometry, element: int) -> int:
    """Returns the bytes per prompt token of the layer with the widest recurrence: its inputs and outputs,
    and float32 queries, keys and values in chunks of 64, with the products of all pairs within a chunk.
    """
    return max((_of_mixer(geometry, layer, element) for layer in geometry.layers), default=0)


def _of_mixer(geometry: ModelGeometry, layer: LayerGeometry, element: int) -> int:
    shapes = {state.kind: state.shape for state in layer.states}
    channels = shapes[StateKind.CONV][1] if StateKind.CONV in shapes else 0
    recurrent = shapes.get(StateKind.RECURRENT, ())
    if len(recurrent) != 3:
        return element * (3 * geometry.hidden_size + 2 * channels)
    h, v, k = recurrent
    if geometry.model_type in _IN_TWO_LAUNCHES and max(k, v) <= _WIDEST:
        chunks = 3 * k + v + 64
    else:  # torch makes copies of what it cuts and moves
        chunks = 10 * k + 4 * v + 6 * 64
    around = 3 * geometry.hidden_size + 2 * channels + 2 * h * v + 2 * h
    return 4 * h * chunks + element * around


def _fixed_parts(layer: LayerGeometry, limits: Limits) -> int:
    """Returns the bytes of one layer's partial results in batch-invariant mode, eager plus recorded."""
    rows, group = 16, layer.num_q_heads // layer.num_kv_heads
    splits = -(-limits.max_model_len // FIXED_SPLIT)
    block = 4 * splits * layer.num_kv_heads * rows * (layer.head_dim_v + 1)
    launched = limits.max_num_batched_tokens * group // rows + limits.max_num_seqs
    recorded = limits.max_num_seqs * -(-group // rows)
    return sum(min(MOST_PARTS, count * block) for count in (launched, recorded))


def _intermediate(config: Mapping[str, Any], geometry: ModelGeometry) -> int:
    """Returns the elements per token between the two products of the widest feed-forward layer."""
    fields = text_section(config)
    dense = _largest(fields.get("intermediate_size"))
    chosen = max(1, _experts_of_a_token(config))
    experts = (_largest(fields.get("moe_intermediate_size")) or dense) * chosen
    return max(dense, experts) or 4 * geometry.hidden_size


def _experts_of_a_token(config: Mapping[str, Any]) -> int:
    """Returns how many experts each token uses; 0 for a model without experts."""
    return _largest(text_section(config).get("num_experts_per_tok"))


def _largest(value: object) -> int:
    """Returns a count, or the largest of a list of counts per layer; 0 for anything else."""
    found = value if isinstance(value, list) else [value]
    return max((v for v in found if isinstance(v, int) and not isinstance(v, bool)), default=0)
