"""Loads a DFlash drafter's weights onto a device, after its files were checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from kvant.errors import BadCheckpoint, WayOut
from kvant.kv.checkpoint.safetensors_header import find_weight_files
from kvant.models.load import TORCH_COMPUTE
from kvant.speculative.base import PlannedDraft
from kvant.speculative.dflash.files import (
    MASK_EMBEDDING_FILE,
    NetworkConfig,
    plain_name,
    read_network,
    required_tensors,
)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer. weight: [out, in]. bias: [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product [.., out] of x [.., in]."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one draft layer. qkv: q, k and v projections stacked. sinks: [num_q_heads] or None."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor
    k_norm: Tensor
    o: Linear
    sinks: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """All weights of a drafter.

    context_kv: the k projections of all layers, then the v projections, applied to context features.
    context_k_norm: [num_layers, 1, head_dim]. embedding, head: None to use the target's.
    token_of: [draft_vocab_size] int64, the target's token for each of the drafter's; None if they are
    equal. mask_embedding: [hidden_size], or None to embed the mask token.
    """

    config: NetworkConfig
    fc: Linear
    hidden_norm: Tensor
    context_kv: Linear
    context_k_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    embedding: Tensor | None
    head: Linear | None
    token_of: Tensor | None
    mask_embedding: Tensor | None


def load_weights(draft: PlannedDraft, device: torch.device) -> DraftWeights:
    """Reads weights from files without a fault in `audit_drafter`. Runs no code of the checkpoint."""
    found = {}
    for path in find_weight_files(draft.path).paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 -- a file is no mapping
                found[plain_name(name)] = file.get_tensor(name)
    return _weights(draft, _Tensors(found, TORCH_COMPUTE[draft.kv.compute_dtype], device))


def make_weights(draft: PlannedDraft, device: torch.device) -> DraftWeights:
    """Returns small random weights instead of the files' required tensors, for timings."""
    config, dtype = read_network(draft.config), TORCH_COMPUTE[draft.kv.compute_dtype]
    generator = torch.Generator(device).manual_seed(0)
    made = {}
    for name, shape in required_tensors(config, draft.geometry, draft.facts).items():
        made[name] = torch.ones(shape, dtype=dtype, device=device)
        if len(shape) > 1 or name.endswith(".bias"):
            made[name].normal_(0.0, 0.02, generator=generator)
    return _weights(draft, _Tensors(made, dtype, device))


def _weights(draft: PlannedDraft, tensors: _Tensors) -> DraftWeights:
    config = read_network(draft.config)
    layers = [f"layers.{layer.index}" for layer in draft.geometry.layers]
    kv = [f"{at}.self_attn.{side}_proj" for side in "kv" for at in layers]
    fc = tensors.linear("fc")
    if fc.weight.dtype is torch.float16:
        # Hidden states reach 25,000 and more: their products with fc can exceed float16's range.
        fc = Linear(tensors.tensor("fc.weight").float())
    return DraftWeights(
        config=config,
        fc=fc,
        hidden_norm=tensors.tensor("hidden_norm.weight"),
        context_kv=tensors.stacked(kv),
        context_k_norm=torch.stack(
            [tensors.tensor(f"{at}.self_attn.k_norm.weight")[None] for at in layers]
        ),
        layers=tuple(_layer(tensors, at) for at in layers),
        norm=tensors.tensor("norm.weight"),
        embedding=tensors.find("embed_tokens.weight"),
        head=tensors.linear("lm_head") if tensors.has("lm_head.weight") else None,
        token_of=_token_of(draft, tensors),
        mask_embedding=_mask_embedding(draft, tensors),
    )


def _layer(tensors: _Tensors, at: str) -> LayerWeights:
    attention = f"{at}.self_attn"
    return LayerWeights(
        input_norm=tensors.tensor(f"{at}.input_layernorm.weight"),
        qkv=tensors.stacked([f"{attention}.{name}_proj" for name in "qkv"]),
        q_norm=tensors.tensor(f"{attention}.q_norm.weight"),
        k_norm=tensors.tensor(f"{attention}.k_norm.weight"),
        o=tensors.linear(f"{attention}.o_proj"),
        sinks=tensors.find(f"{attention}.attention_sink_bias"),
        mlp_norm=tensors.tensor(f"{at}.post_attention_layernorm.weight"),
        gate_up=tensors.stacked([f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]),
        down=tensors.linear(f"{at}.mlp.down_proj"),
    )


class _Tensors:
    """Tensors of a checkpoint by plain name; floating-point tensors are converted to `dtype`."""

    def __init__(
        self, found: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device = dtype, device
        self._found = found

    def has(self, name: str) -> bool:
        return name in self._found

    def tensor(self, name: str) -> Tensor:
        found = self._found[name]
        dtype = self.dtype if found.dtype.is_floating_point else found.dtype
        return found.to(device=self.device, dtype=dtype)

    def find(self, name: str) -> Tensor | None:
        return self.tensor(name) if self.has(name) else None

    def linear(self, name: str) -> Linear:
        return Linear(self.tensor(f"{name}.weight"), self.find(f"{name}.bias"))

    def stacked(self, names: list[str]) -> Linear:
        """Returns several linear layers with a common input as one, their outputs concatenated."""
        parts = [self.linear(name) for name in names]
        biases = [part.bias for part in parts if part.bias is not None]
        return Linear(
            torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None
        )


def _token_of(draft: PlannedDraft, tensors: _Tensors) -> Tensor | None:
    """Returns the target's token of each draft token, or None. d2t holds offsets: token = i + d2t[i]."""
    distances = tensors.find("d2t")
    if distances is None:
        return None
    tokens = torch.arange(len(distances), device=distances.device) + distances.to(torch.int64)
    if not bool(((tokens >= 0) & (tokens < draft.facts.target_vocab_size)).all()):
        raise _bad_table(draft, "d2t leads to tokens that the target does not have")
    chosen = tensors.find("t2d")
    if chosen is not None and not torch.equal(chosen.bool().nonzero().flatten(), tokens):
        raise _bad_table(draft, "t2d and d2t speak of different tokens")
    return tokens


def _mask_embedding(draft: PlannedDraft, tensors: _Tensors) -> Tensor | None:
    """Returns the mask embedding [hidden_size] from a file of its own, else from the checkpoint, or None."""
    path = draft.path / MASK_EMBEDDING_FILE
    if not path.is_file():
        return tensors.find("mask_embedding")
    with safe_open(path, framework="pt", device="cpu") as file:
        found: Tensor = file.get_tensor("mask_embedding")
    if found.shape != (draft.geometry.hidden_size,):
        raise _bad_table(draft, f"{path.name} holds no embedding of the hidden size")
    return found.to(device=tensors.device, dtype=tensors.dtype)


def _bad_table(draft: PlannedDraft, why: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"the drafter in {draft.path} cannot be used",
        why=why,
        ways_out=(WayOut("fetch the drafter again from where it was published"),),
    )
