"""The forward of plain dense decoders (Llama, Mistral, Qwen2, Qwen3) over packed tokens.

It runs the weights of a transformers module that was loaded as usual: q, k and v in one matrix
product, gate and up in another, everything between them in few launches. A model that differs in
anything from what this file computes is not fused; it runs through transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from kvant.attention.base import AttentionParams, StepCall
from kvant.kv.spec import KVPlan
from kvant.models.fused.kernels import InvariantTorchKernels, Kernels, TorchKernels

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [T, in], weight [out, in], bias [out] or None -> [T, out]."""

_FUSED: tuple[type[PreTrainedModel], ...] = (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. qkv, gate_up: weight and bias of products that were several."""

    input_norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: tuple[Tensor, Tensor | None]
    post_norm: Tensor
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    num_q_heads: int
    num_kv_heads: int
    params: AttentionParams


def fuse(module: PreTrainedModel, plan: KVPlan) -> FusedDecoder | None:
    """The fused forward of a loaded module, or None for one that it would not compute exactly.

    The module's parameters become views of the fused ones: no weight lies in memory twice.
    """
    if type(module) not in _FUSED or module.config.get_text_config().hidden_act != "silu":
        return None
    decoder: Any = module.get_decoder()  # type: ignore[no-untyped-call]
    layers = [_layer_of(layer, plan) for layer in decoder.layers]
    if any(layer is None for layer in layers):
        return None
    return FusedDecoder(module, [layer for layer in layers if layer is not None])


class FusedDecoder:
    """Mutates nothing but the pool. linear: the matrix product, one for all of them."""

    def __init__(self, module: PreTrainedModel, layers: Sequence[Layer]) -> None:
        decoder: Any = module.get_decoder()  # type: ignore[no-untyped-call]
        head: Any = module.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.linear = linear_for(head.weight)
        self.layers = tuple(layers)
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.rotary = decoder.rotary_emb
        self.norm: Tensor = decoder.norm.weight
        self.head: Tensor = head.weight
        self.head_bias: Tensor | None = head.bias
        self.eps = float(decoder.norm.variance_epsilon)
        self._kernels = kernels_for(self.embedding)

    def make_invariant(self, linear: Linear) -> None:
        """From now on no row's result depends on the rows beside it. linear: of that kind."""
        self.linear = linear
        if isinstance(self._kernels, TorchKernels):
            self._kernels = InvariantTorchKernels()

    def forward(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits [len(logits_index), vocab_size], and what `layers` hand on, [T, hidden_size] each."""
        kernels, linear, step, eps = self._kernels, self.linear, call.step, self.eps
        residual = F.embedding(input_ids, self.embedding)
        cos, sin = frequencies(self.rotary, residual, step.positions)
        taps: dict[int, Tensor] = {}
        x = kernels.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            q, k, v = kernels.rotate(
                linear(x, *layer.qkv),
                cos,
                sin,
                layer.num_q_heads,
                layer.num_kv_heads,
                layer.q_norm,
                layer.k_norm,
                eps,
            )
            backend, cache = call.backends[index], call.pool[index]
            backend.write(cache, k, v, step)
            last = index + 1 == len(self.layers)
            narrowed = last and step.wanted is not None and index not in layers
            if narrowed:  # K and V are stored; nobody looks at the other rows of what follows
                assert step.wanted is not None
                q, residual, step = q[logits_index], residual[logits_index], step.wanted
            attended = backend.attend(cache, q, step, layer.params)
            x = linear(attended.reshape(residual.shape[0], -1), *layer.output)
            x, residual = kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = linear(kernels.silu_mul(linear(x, *layer.gate_up)), *layer.down)
            if last:
                if index in layers:
                    taps[index] = x + residual
                if not narrowed:
                    x, residual = x[logits_index], residual[logits_index]
                x, _ = kernels.add_rms_norm(x, residual, self.norm, eps)
            else:
                norm = self.layers[index + 1].input_norm
                x, residual = kernels.add_rms_norm(x, residual, norm, eps)
                if index in layers:
                    taps[index] = residual.clone()  # the next layers add to it in place
        logits = linear(x, self.head, self.head_bias)
        return logits, tuple(taps[index] for index in layers)


def frequencies(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim / 2]: transformers' own, whose second half repeats the first."""
    cos, sin = rotary(x[None], positions[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def linear_for(weight: Tensor) -> Linear:
    """torch's; on a GPU with a kernel of our own for single rows."""
    if weight.device.type == "cuda":
        from kvant.models.fused.matvec import linear

        return linear
    return F.linear


def kernels_for(weight: Tensor) -> Kernels:
    """Triton's on a GPU, plain torch elsewhere and for float64."""
    if weight.device.type == "cuda" and weight.dtype is not torch.float64:
        from kvant.models.fused.triton_kernels import TritonKernels

        return TritonKernels()
    return TorchKernels()


def _layer_of(layer: Any, plan: KVPlan) -> Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    spec = plan.layers[attention.layer_idx]
    geometry = spec.geometry
    products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if any(type(product) is not nn.Linear for product in products):
        return None  # quantised, or replaced by somebody
    window = getattr(attention, "sliding_window", None)
    if window != geometry.window or geometry.sinks or geometry.softcap or not geometry.causal:
        return None
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=_join(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        output=(attention.o_proj.weight, attention.o_proj.bias),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_join(mlp.gate_proj, mlp.up_proj),
        down=(mlp.down_proj.weight, mlp.down_proj.bias),
        num_q_heads=geometry.num_q_heads,
        num_kv_heads=geometry.num_kv_heads,
        params=AttentionParams(scale=attention.scaling, window=window),
    )


def _join(*products: Any) -> tuple[Tensor, Tensor | None]:
    """Several products of one input as one; their own weights become views of it."""
    weight = _joined([product.weight for product in products])
    biases = [product.bias for product in products if product.bias is not None]
    if not biases:
        return weight, None
    assert len(biases) == len(products), "q, k and v, or gate and up, have biases together or none"
    return weight, _joined(biases)


def _joined(parameters: Sequence[Any]) -> Tensor:
    whole = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = whole[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return whole
