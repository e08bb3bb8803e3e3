"""A DFlash drafter in plain torch: the network, its checkpoint format, its attention mask.

The drafter (arXiv 2602.06036) is a small transformer that reads two things: *context features*,
made from hidden states of some of the target's layers for every token the target has already run,
and a *query block*: the last emitted token (the anchor) followed by ``block_size - 1`` mask tokens.
One non-causal pass over features and block gives a token for every mask at once. Embedding and
lm_head are the target's own and are not stored.

Checkpoints use the tensor names and the config.json fields of the drafters published by z-lab.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The shape of a drafter. Layer ids count from 0: id i reads the output of decoder layer i."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}; the anchor and one mask need 2")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if bad or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids {self.target_layer_ids} must be decoder layers of the target, "
                f"0 to {self.num_target_layers - 1}"
            )

    def to_json(self) -> dict[str, Any]:
        """The fields of config.json, as published drafters have them."""
        fields = asdict(self)
        nested = {
            "mask_token_id": fields.pop("mask_token_id"),
            "target_layer_ids": list(fields.pop("target_layer_ids")),
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            **fields,
            "dflash_config": nested,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> DrafterConfig:
        """Read back what ``to_json`` wrote. KeyError names a missing field."""
        flat = {**fields, **fields["dflash_config"]}
        flat["target_layer_ids"] = tuple(flat["target_layer_ids"])
        return cls(**{name: flat[name] for name in cls.__slots__})


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class FeatureProjection(nn.Module):
    """``fc``: concatenated hidden states -> hidden_size, with a fixed divisor per input channel.

    Channels of the residual stream differ by orders of magnitude, within and between layers.
    Training sees each channel divided by its typical size; the divisor is folded into the weight
    when the drafter is saved, so that a loader needs to know nothing of it.
    """

    input_scale: Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_buffer("input_scale", torch.ones(in_features), persistent=False)

    def folded_weight(self) -> Tensor:
        return self.weight / self.input_scale

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.folded_weight().to(features.dtype))


def rotary(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, N, head_dim] for absolute positions [B, N] (the two-halves convention)."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    angle = positions.to(wide)[:, None, :, None] * (theta**-exponent).to(wide)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Queries from the block; keys and values from the context features and the block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, hidden, bias=False)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)
        self.groups = config.num_attention_heads // config.num_key_value_heads

    def heads(self, x: Tensor) -> Tensor:
        """[B, N, heads * head_dim] -> [B, N, heads, head_dim]"""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask | None,
    ) -> Tensor:
        query = rotate(self.q_norm(self.heads(self.q_proj(block))).transpose(1, 2), *block_rope)
        keys, values = [], []
        for source, rope in ((context, context_rope), (block, block_rope)):
            key = self.k_norm(self.heads(self.k_proj(source))).transpose(1, 2)
            keys.append(rotate(key, *rope).to(query.dtype))
            values.append(self.heads(self.v_proj(source)).transpose(1, 2).to(query.dtype))
        key = torch.cat(keys, dim=2).repeat_interleave(self.groups, dim=1)
        value = torch.cat(values, dim=2).repeat_interleave(self.groups, dim=1)
        if isinstance(mask, BlockMask):
            out = flex_attention(query, key, value, block_mask=mask)
            assert isinstance(out, Tensor)
        else:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        joined: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return joined


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask | None,
    ) -> Tensor:
        # The context skips the layer's input norm: hidden_norm normalised it once for all layers.
        normed = self.input_layernorm(block)
        block = block + self.self_attn(normed, context, block_rope, context_rope, mask)
        out: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return out


class Drafter(nn.Module):
    """The drafter. ``forward`` returns normed states; the target's lm_head makes them logits."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        taps = len(config.target_layer_ids)
        self.fc = FeatureProjection(taps * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # Branches that write into the residual stream begin small.
                gain = 0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=gain * weight.shape[1] ** -0.5)

    def context(self, features: Tensor) -> Tensor:
        """Features of the tapped layers [B, L, taps * hidden_size] -> [B, L, hidden_size]."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        block_positions: Tensor,
        context_positions: Tensor,
        mask: Tensor | BlockMask | None,
    ) -> Tensor:
        """Fill blocks.

        ``block`` [B, Q, hidden_size] are embeddings of the query tokens (one block, or many side
        by side), ``context`` [B, L, hidden_size] comes from ``context``; positions are absolute,
        [B, Q] and [B, L]. ``mask`` says which of the L + Q keys a query sees (None: all of them).
        Returns [B, Q, hidden_size].
        """
        config = self.config
        block_rope = rotary(block_positions, config.head_dim, config.rope_theta, block.dtype)
        context_rope = rotary(context_positions, config.head_dim, config.rope_theta, block.dtype)
        for layer in self.layers:
            block = layer(block, context, block_rope, context_rope, mask)
        out: Tensor = self.norm(block)
        return out

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors (bfloat16, the divisor folded into fc)."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: weight.detach() for name, weight in self.named_parameters()}
        state["fc.weight"] = self.fc.folded_weight().detach()
        state = {name: w.to("cpu", torch.bfloat16).contiguous() for name, w in state.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
        """Read a drafter that ``save`` wrote. RuntimeError names missing or unexpected tensors."""
        config = DrafterConfig.from_json(json.loads((folder / "config.json").read_text()))
        drafter = cls(config)
        drafter.load_state_dict(load_file(folder / "model.safetensors"))
        return drafter.to(dtype).eval()


def evenly_spaced_layers(num_target_layers: int, taps: int) -> tuple[int, ...]:
    """Layers to tap: ``taps`` of them, from the second to the last but one.

    The very last layer is left out: its output reaches some readers with, others without the final
    norm.
    """
    last = max(num_target_layers - 2, 0)
    first = min(1, last)
    if taps == 1:
        return (last,)
    step = (last - first) / (taps - 1)
    ids = tuple(dict.fromkeys(round(first + i * step) for i in range(taps)))
    if len(ids) < taps:
        raise ValueError(f"a target of {num_target_layers} layers has no {taps} layers to tap")
    return ids


def block_visibility(segments: Tensor, anchors: Tensor, block_size: int) -> MaskMod:
    """What the queries of many blocks may see, as a flex_attention mask.

    ``segments`` [B, L] tells the sequences of a packed row apart; ``anchors`` [B, A] are indices in
    the row. Query q belongs to block q // block_size. Keys 0..L-1 are the row's context, keys L..
    the blocks. A block sees the context before its anchor, in the anchor's sequence, and all of
    itself.
    """
    length = segments.shape[1]

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // block_size
        anchor = anchors[b, block]
        index = torch.where(kv < length, kv, 0)
        same = segments[b, index] == segments[b, anchor]
        context = (kv < length) & same & (kv < anchor)
        own = (kv >= length) & ((kv - length) // block_size == block)
        return context | own

    return visible


def dense_mask(
    visible: MaskMod, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    """The mask as a bool tensor [batch, 1, queries, keys], for scaled_dot_product_attention."""
    b = torch.arange(batch, device=device)[:, None, None, None]
    q = torch.arange(queries, device=device)[:, None]
    kv = torch.arange(keys, device=device)
    return visible(b, torch.zeros_like(b), q, kv)
