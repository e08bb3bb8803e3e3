"""What a GPU holds beside weights and pages, counted before anything is loaded.

No allocator is asked: every number follows from the model's shape and from the size of steps, so
`kvant plan` shows it for a device that is not here. docs/benchmarks/memory.md holds it against an H200.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvant.attention.need import FIXED_SPLIT, MOST_PARTS, DeviceFacts, DeviceKind
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import LayerGeometry, ModelGeometry
from kvant.plan.graph_sizes import MOST_PIECES, draft_sizes

RUNTIME_BYTES = 1024 * 2**20
"""The driver's context, the kernels of libraries and of Kvant, and the libraries' own workspaces."""

FRAGMENTS = 1.25
"""What an allocator keeps of memory for steps whose sizes vary, over what one step needs."""

_ELEMENT_BYTES = {
    ComputeDtype.FLOAT64: 8,
    ComputeDtype.FLOAT32: 4,
    ComputeDtype.FLOAT16: 2,
    ComputeDtype.BFLOAT16: 2,
}


@dataclass(frozen=True, slots=True)
class StepSize:
    """max_num_seqs, max_num_batched_tokens."""

    seqs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Bytes. step: activations of the largest step. logits: of the sampler and of recorded graphs.
    prompts: a long prompt's keys and values, decoded, and the parts of its attention.
    """

    runtime: int
    step: int
    logits: int
    prompts: int

    @property
    def total(self) -> int:
        return self.runtime + self.step + self.logits + self.prompts


def default_step(device: DeviceFacts, max_num_seqs: int | None = None) -> StepSize:
    """A CPU step of more tokens would take seconds. On a GPU whoever answers takes no room from prompts,
    which then are cut at the same places in every step.
    """
    on_cpu = device.kind is DeviceKind.CPU
    seqs = (32 if on_cpu else 256) if max_num_seqs is None else max_num_seqs
    return StepSize(seqs, 512 if on_cpu else 8192 + seqs)


def workspaces(
    geometry: ModelGeometry,
    config: Mapping[str, Any],
    compute: ComputeDtype,
    step: StepSize,
    max_model_len: int,
    num_drafts: Sequence[int] = (),
    *,
    batch_invariant: bool = False,
    forward_bytes: int = 0,
) -> Workspaces:
    """Of a GPU. config: the model's config.json. max_model_len: the longest sequence that is served.

    num_drafts: numbers of drafts of each sequence for which steps are recorded. forward_bytes: what
    the forward holds for itself.
    """
    element = _ELEMENT_BYTES[compute]
    layers = [layer for layer in geometry.layers if layer.num_q_heads]
    q = max((g.num_q_heads * max(g.head_dim_k, g.head_dim_v) for g in layers), default=0)
    kv = max((g.num_kv_heads * (g.head_dim_k + g.head_dim_v) for g in layers), default=0)
    # Of one token at the widest place: residual, its norm, what attention had and gave, and the two
    # sides of the gated product beside what they become.
    wide = 3 * geometry.hidden_size + 2 * (q + kv) + q + 3 * _intermediate(config, geometry)
    # Recorded steps with pieces of prompts have their own.
    activations = (step.tokens + min(step.tokens, MOST_PIECES)) * wide * element
    # The model's logits and their float32 copy, of the step with most rows, and those that all recorded
    # steps share.
    with_drafts = ((1 + n) * size for n in num_drafts for size in draft_sizes(n, step.seqs))
    rows = max([step.seqs, *with_drafts]) * (2 * element + 2 * 4)
    # Decoded once for a prompt; queries, their padded copy and the product, then parts in float32.
    decoded = max_model_len * kv * element
    parts = step.tokens * q * (3 * element + 2 * 4)
    if batch_invariant:
        parts += max((_fixed_parts(layer, step, max_model_len) for layer in layers), default=0)
    return Workspaces(
        runtime=RUNTIME_BYTES + forward_bytes,
        step=int(FRAGMENTS * activations),
        logits=geometry.vocab_size * rows,
        prompts=int(FRAGMENTS * (decoded + parts)),
    )


def _fixed_parts(layer: LayerGeometry, step: StepSize, max_model_len: int) -> int:
    """Bytes of parts of one layer in batch-invariant mode, of a launched step and of recorded ones."""
    rows, group = 16, layer.num_q_heads // layer.num_kv_heads
    splits = -(-max_model_len // FIXED_SPLIT)
    block = 4 * splits * layer.num_kv_heads * rows * (layer.head_dim_v + 1)
    blocks = step.tokens * group // rows + step.seqs, step.seqs * -(-group // rows)
    return sum(min(MOST_PARTS, count * block) for count in blocks)


def _intermediate(config: Mapping[str, Any], geometry: ModelGeometry) -> int:
    """Elements between the two products of a feed-forward layer, for one token."""
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    dense = _largest(fields.get("intermediate_size"))
    experts = _largest(fields.get("moe_intermediate_size")) * max(
        1, _largest(fields.get("num_experts_per_tok"))
    )
    return max(dense, experts) or 4 * geometry.hidden_size


def _largest(value: object) -> int:
    """A count, or the largest of one for each layer; 0 for anything else."""
    found = value if isinstance(value, list) else [value]
    return max((v for v in found if isinstance(v, int) and not isinstance(v, bool)), default=0)
