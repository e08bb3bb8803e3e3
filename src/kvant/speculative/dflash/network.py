"""The DFlash drafter's network: writes context K and V to its own pages, then fills a block of masks.

    hidden states of the tapped layers --fc, hidden_norm--> context features
        --one matrix for all layers, k_norm, rotary--> K and V of every layer, into the pages

    [last token, mask, mask, ..] --embedding--> per layer: norm, q k v, write, attend, MLP
        --norm, head--> a token for every mask

Context features skip each layer's input norm, because hidden_norm normalises them once for all layers. The
block's K and V are written after the context and read without a causal mask. They are overwritten when
the tokens at those positions are known.
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
from kvant.models.fused.decoder import kernels_for
from kvant.models.fused.kernels import TorchKernels, WideTorchKernels
from kvant.models.fused.layers import Norm, QKNorms
from kvant.models.fused.recipe import Activation, NormKind
from kvant.models.geometry.draft import ROTARY_FIELDS
from kvant.models.loaded import LoadedModel
from kvant.models.rotary import fix_frequencies
from kvant.speculative.base import PlannedDraft
from kvant.speculative.dflash.weights import DraftWeights, LayerWeights


class DraftNetwork:
    """A drafter's weights and pages. pool: the drafter's K and V, indexed by the target's page ids."""

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
        self._eps = weights.config.rms_norm_eps
        kernels = kernels_for(weights.norm)
        self._kernels = WideTorchKernels() if isinstance(kernels, TorchKernels) else kernels
        longest = max_model_len + draft.facts.block_size
        self._rotary = _rotary(draft.config, longest).to(target.device)

    def write_context(self, hidden: Sequence[Tensor], ran: Step) -> None:
        """Writes every draft layer's K and V of the T tokens that the target ran.

        hidden: [T, hidden_size] of each tapped layer. ran: the target's step with these tokens.
        """
        weights, first, kernels = self._weights, self._layers[0], self._kernels
        positions = ran.positions
        count, heads, tokens = len(self._layers), first.num_kv_heads, positions.shape[0]
        features = torch.cat([part.to(weights.fc.weight.dtype) for part in hidden], dim=-1)
        context = kernels.norm(
            weights.fc(features), self._norm(weights.hidden_norm.to(features.dtype))
        )
        keys, values = weights.context_kv(context.to(self._dtype)).chunk(2, dim=-1)
        k = keys.reshape(tokens, count, heads, first.head_dim_k)
        v = values.view(tokens, count, heads, first.head_dim_v)
        cos, sin = self._angles(positions)
        for place, layer in enumerate(self._layers):
            cache, backend = self._pool[layer.index], self._backends[layer.index]
            slots = ran.of(self._pool.group_of(layer.index)).slot_mapping
            step = _write_only(slots, positions)
            k_norm = self._norm(weights.context_k_norm[place, 0])
            own = k[:, place].reshape(tokens, -1)
            rotated, _, _ = kernels.rotate(own, cos, sin, heads, 0, QKNorms(k_norm, k_norm))
            backend.write(cache, rotated, v[:, place], step)

    def fill(self, block: Tensor, steps: Mapping[bool, Step]) -> Tensor:
        """Returns the likeliest token at every position of the blocks, [N] int64 in the target's vocabulary.

        block: [N] int64, for each sequence its last token and masks. steps: the step of these tokens for
        layers that are causal within the block (True) or not (False). Writes the block's K and V.
        """
        weights, kernels = self._weights, self._kernels
        residual = self._embed(block)
        cos, sin = self._angles(next(iter(steps.values())).positions)
        x = kernels.norm(residual, self._norm(weights.layers[0].input_norm))
        for place, (layer, own) in enumerate(zip(self._layers, weights.layers, strict=True)):
            x = self._attention(x, layer, own, cos, sin, steps[layer.causal])
            x, residual = kernels.add_norm(x, residual, self._norm(own.mlp_norm))
            x = own.down(kernels.gate(own.gate_up(x), Activation.SILU))
            last = place + 1 == len(self._layers)
            norm = weights.norm if last else weights.layers[place + 1].input_norm
            x, residual = kernels.add_norm(x, residual, self._norm(norm))
        head = weights.head
        drafts = (self._target.score(x) if head is None else head(x)).argmax(-1)
        group = self._target.group
        if (
            group is not None and head is not None
        ):  # take rank 0's drafts: other ranks may round differently
            drafts = group.gather(drafts)[: len(drafts)]
        return drafts if weights.token_of is None else weights.token_of[drafts]

    def _attention(
        self,
        x: Tensor,
        layer: LayerGeometry,
        weights: LayerWeights,
        cos: Tensor,
        sin: Tensor,
        step: Step,
    ) -> Tensor:
        q, k, v = self._kernels.rotate(
            weights.qkv(x),
            cos,
            sin,
            layer.num_q_heads,
            layer.num_kv_heads,
            QKNorms(self._norm(weights.q_norm), self._norm(weights.k_norm)),
        )
        cache, backend = self._pool[layer.index], self._backends[layer.index]
        step = step.of(self._pool.group_of(layer.index))
        # Write before `attend`, because the block reads its own rows.
        backend.write(cache, k, v, step)
        params = AttentionParams(
            scale=layer.head_dim_k**-0.5, window=layer.window, sinks=weights.sinks
        )
        return weights.o(backend.attend(cache, q, step, params).flatten(1))

    def _norm(self, weight: Tensor) -> Norm:
        return Norm(NormKind.RMS, weight, None, self._eps)

    def _embed(self, block: Tensor) -> Tensor:
        own, mask = self._weights.embedding, self._weights.mask_embedding
        x = self._target.embed(block) if own is None else F.embedding(block, own)
        if mask is not None:
            x = torch.where((block == self._mask_token_id)[:, None], mask.to(x), x)
        return x.to(self._dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [T, head_dim / 2] of positions [T]; a head's second half would repeat them."""
        probe = torch.empty(0, dtype=self._dtype, device=positions.device)
        cos, sin = self._rotary(probe, positions[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _write_only(slots: Tensor, positions: Tensor) -> Step:
    """Returns a step that only writes K and V. slots, positions: [T] int64."""
    nothing = torch.zeros(1, dtype=torch.int32, device=slots.device)
    return Step(nothing, nothing[:0], nothing[None, :0], slots, positions, 0, 0)


def _rotary(config: Mapping[str, Any], max_model_len: int) -> Any:
    """Returns transformers' rotary embedding, with its scalings, fixed for the longest sequence."""
    section = config.get("transformer_layer_config") or config
    fields = {name: section[name] for name in ROTARY_FIELDS if section.get(name) is not None}
    rotary = Qwen3RotaryEmbedding(Qwen3Config(**fields))
    fix_frequencies(rotary, max_model_len)
    return rotary
