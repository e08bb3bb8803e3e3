"""The drafter's network over its own pages: context in one pass, then a block that is filled.

    hidden states of the tapped layers --fc, hidden_norm--> context features
        --one matrix for all layers, k_norm, rotary--> K and V of every layer, into the pages

    [last token, mask, mask, ..] --embedding--> per layer: norm, q k v, write, attend, MLP
        --norm, head--> a token for every mask

Context features skip a layer's input norm: hidden_norm normalised them once for all layers. The
block's K and V are written past the end like any others, read without a causal mask, and
overwritten when the tokens at those places are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from kvant.attention.backends import load_backends
from kvant.attention.base import AttentionParams, Step
from kvant.kv.geometry import LayerGeometry
from kvant.kv.pool import KVPool
from kvant.models.loaded import LoadedModel
from kvant.models.rotary import fix_frequencies
from kvant.speculative.base import PlannedDraft
from kvant.speculative.dflash.weights import DraftWeights, LayerWeights

_ROTARY_FIELDS = (
    "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "head_dim",
    "hidden_size", "num_attention_heads",
)  # fmt: skip


class DraftNetwork:
    """A drafter beside its target. pool: indexed by the target's page ids."""

    def __init__(
        self,
        draft: PlannedDraft,
        weights: DraftWeights,
        target: LoadedModel,
        pool: KVPool,
        max_model_len: int,
    ) -> None:
        self._weights = weights
        self._target = target
        self._pool = pool
        self._layers = draft.geometry.layers
        self._backends = load_backends(draft.kv)
        self._mask_token_id = draft.facts.mask_token_id
        self._dtype = weights.norm.dtype
        longest = max_model_len + draft.facts.block_size
        self._rotary = _rotary(draft.config, longest).to(target.device)

    def write_context(self, hidden: Sequence[Tensor], slots: Tensor, positions: Tensor) -> None:
        """K and V of every layer for tokens that the target ran.

        hidden: [T, hidden_size] of each tapped layer. slots, positions: [T] int64.
        """
        weights, first = self._weights, self._layers[0]
        count, heads = len(self._layers), first.num_kv_heads
        features = torch.cat([part.to(weights.fc.weight.dtype) for part in hidden], dim=-1)
        context = self._norm(weights.fc(features), weights.hidden_norm).to(self._dtype)
        keys, values = weights.context_kv(context).chunk(2, dim=-1)
        k = keys.view(-1, count, heads, first.head_dim_k)
        cos, sin = self._angles(positions)
        k = _rotate(self._norm(k, weights.context_k_norm), cos[:, None], sin[:, None])
        v = values.view(-1, count, heads, first.head_dim_v)
        step = _write_only(slots, positions)
        for place, layer in enumerate(self._layers):
            cache, backend = self._pool[layer.index], self._backends[layer.index]
            backend.write(cache, k[:, place], v[:, place], step)

    def fill(self, block: Tensor, steps: Mapping[bool, Step]) -> Tensor:
        """The likeliest token at every place of the block(s): [N] int64 of the target's vocabulary.

        block: [N] int64, for each sequence its last token and masks. steps: by whether a layer is
        causal in the block, the same step otherwise. Writes the block's K and V.
        """
        x = self._embed(block)
        cos, sin = self._angles(next(iter(steps.values())).positions)
        for layer, weights in zip(self._layers, self._weights.layers, strict=True):
            x = self._layer(x, layer, weights, cos, sin, steps[layer.causal])
        x = self._norm(x, self._weights.norm)
        head = self._weights.head
        drafts = (self._target.score(x) if head is None else head(x)).argmax(-1)
        token_of = self._weights.token_of
        return drafts if token_of is None else token_of[drafts]

    def _layer(
        self,
        x: Tensor,
        layer: LayerGeometry,
        weights: LayerWeights,
        cos: Tensor,
        sin: Tensor,
        step: Step,
    ) -> Tensor:
        q_width = layer.num_q_heads * layer.head_dim_k
        kv_width = layer.num_kv_heads * layer.head_dim_k
        mixed = weights.qkv(self._norm(x, weights.input_norm))
        q, k, v = torch.split(mixed, [q_width, kv_width, kv_width], dim=-1)
        q = self._norm(q.view(-1, layer.num_q_heads, layer.head_dim_k), weights.q_norm)
        k = self._norm(k.view(-1, layer.num_kv_heads, layer.head_dim_k), weights.k_norm)
        cache, backend = self._pool[layer.index], self._backends[layer.index]
        # Written before attend: the block reads its own rows.
        v = v.view(-1, layer.num_kv_heads, layer.head_dim_v)
        backend.write(cache, _rotate(k, cos, sin), v, step)
        params = AttentionParams(
            scale=layer.head_dim_k**-0.5, window=layer.window, sinks=weights.sinks
        )
        attended = backend.attend(cache, _rotate(q, cos, sin), step, params)
        x = x + weights.o(attended.flatten(1))
        gate, up = weights.gate_up(self._norm(x, weights.mlp_norm)).chunk(2, dim=-1)
        return x + weights.down(F.silu(gate) * up)

    def _embed(self, block: Tensor) -> Tensor:
        own, mask = self._weights.embedding, self._weights.mask_embedding
        x = self._target.embed(block) if own is None else F.embedding(block, own)
        if mask is not None:
            x = torch.where((block == self._mask_token_id)[:, None], mask.to(x), x)
        return x.to(self._dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm over the last dimension, in float32 at least."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        eps = self._weights.config.rms_norm_eps
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normed.to(weight.dtype) * weight

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim] for absolute positions [T]."""
        probe = torch.empty(0, dtype=self._dtype, device=positions.device)
        cos, sin = self._rotary(probe, positions[None])
        return cos[0, :, None], sin[0, :, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the two halves of a head (the convention of Llama and Qwen)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _write_only(slots: Tensor, positions: Tensor) -> Step:
    """A step that nobody attends in."""
    nothing = torch.zeros(1, dtype=torch.int32, device=slots.device)
    return Step(nothing, nothing[:0], nothing[None, :0], slots, positions, 0, 0)


def _rotary(config: Mapping[str, Any], max_model_len: int) -> Any:
    """transformers' own frequencies, every scaling it knows, fixed for the longest sequence."""
    section = config.get("transformer_layer_config") or config
    fields = {name: section[name] for name in _ROTARY_FIELDS if section.get(name) is not None}
    rotary = Qwen3RotaryEmbedding(Qwen3Config(**fields))
    fix_frequencies(rotary, max_model_len)
    return rotary
