"""The forward of plain decoders over packed tokens, dense (Llama, Qwen3) or of experts (Qwen3-MoE, Mixtral).

It runs the weights of a transformers module that was loaded as usual: q, k and v in one matrix
product, gate and up in another, with few launches between them. A model that differs in anything
from this file's computation is not fused; it runs through transformers.
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
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from kvant.attention.base import AttentionParams, HeadRotation, RotatingWriter, Step, StepCall
from kvant.errors import EngineFault
from kvant.kv.spec import KVPlan
from kvant.models.forward import apply_head
from kvant.models.forward_info import ForwardChoice
from kvant.models.fused.experts import ExpertKernels, Experts, Shared, TorchExperts
from kvant.models.fused.info import MOST_ANGLES
from kvant.models.fused.kernels import InvariantTorchKernels, Kernels, TorchKernels
from kvant.models.fused.routing import Routing
from kvant.models.invariant.linear import TiledLinear, prove_all
from kvant.models.sharding.divide import Group, gather_logits

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [T, in], weight [out, in], bias [out] or None -> [T, out]."""

_FUSED: tuple[type[PreTrainedModel], ...] = (
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)


_ONE_WINDOW = ("mistral", "mixtral")
"""Families whose attention modules leave the window to the config, which has one for all layers."""

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies depend on a token's own position alone."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A feed-forward layer. gate_up: weight and bias of two products."""

    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. qkv: weight and bias of three products."""

    input_norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: tuple[Tensor, Tensor | None]
    post_norm: Tensor
    feed_forward: Dense | Experts
    num_q_heads: int
    num_kv_heads: int
    params: AttentionParams


def make(
    module: PreTrainedModel, plan: KVPlan, choice: ForwardChoice, group: Group | None = None
) -> FusedDecoder:
    """Build the fused forward of a loaded module. EngineFault if the module does not match the plan."""
    return fuse(module, plan, batch_invariant=choice.batch_invariant, group=group)


def fuse(
    module: PreTrainedModel,
    plan: KVPlan,
    *,
    batch_invariant: bool = False,
    group: Group | None = None,
) -> FusedDecoder:
    """The fused forward of a loaded module.

    The module's parameters become views of the fused ones, so no weight is stored twice.
    batch_invariant: no row's result depends on the rows beside it. group: the ranks that share the
    model, of which the module is one's part. EngineFault for a module that the
    decoder would not compute exactly.
    """
    name = type(module).__name__
    if type(module) not in _FUSED or module.config.get_text_config().hidden_act != "silu":
        raise EngineFault(f"the plan runs {name} through Kvant's own decoder, which cannot")
    decoder: Any = module.get_decoder()  # type: ignore[no-untyped-call]
    layers = [_layer_of(layer, plan) for layer in decoder.layers]
    if not batch_invariant:
        return FusedDecoder(module, layers, group=group)
    linear = TiledLinear()
    prove_all(linear, module)
    return FusedDecoder(module, layers, linear, group=group)


class FusedDecoder:
    """Mutates nothing but the pool.

    linear: the batch-invariant matrix product, one for all of them; None for the fastest one. group: the
    ranks that share the model.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        layers: Sequence[Layer],
        linear: Linear | None = None,
        group: Group | None = None,
    ) -> None:
        decoder: Any = module.get_decoder()  # type: ignore[no-untyped-call]
        head: Any = module.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.linear = linear_for(head.weight) if linear is None else linear
        self.layers = tuple(layers)
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.rotary = decoder.rotary_emb
        self.norm: Tensor = decoder.norm.weight
        self.head: Tensor = head.weight
        self.head_bias: Tensor | None = head.bias
        self.eps = float(decoder.norm.variance_epsilon)
        self._module = module
        self._group = group
        self._vocab_size = int(module.config.get_text_config().vocab_size)
        self._kernels = kernels_for(self.embedding, batch_invariant=linear is not None)
        self.experts = experts_for(self.embedding)
        self._table: tuple[Tensor, Tensor] | None = None
        if self.embedding.device.type != "cpu" and self.rotary.rope_type in _FIXED_ROPE:
            most = module.config.get_text_config().max_position_embeddings
            places = torch.arange(min(most, MOST_ANGLES), device=self.embedding.device)
            with torch.no_grad():
                self._table = frequencies(self.rotary, self.embedding, places)

    @property
    def extra_bytes(self) -> int:
        """Bytes of the table of angles."""
        return sum(part.numel() * part.element_size() for part in self._table or ())

    @property
    def compiled_seconds(self) -> float | None:
        return None

    def score(self, hidden: Tensor) -> Tensor:
        return apply_head(self._module, hidden)

    def run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits [len(logits_index), vocab_size] and outputs of `layers`, each [T, hidden_size]."""
        kernels, linear, step, eps = self._kernels, self.linear, call.step, self.eps
        residual = F.embedding(input_ids, self.embedding)
        angles = self.angles(step)
        taps: dict[int, Tensor] = {}
        x = kernels.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            q = self.enter(index, linear(x, *layer.qkv), angles, call)
            last = index + 1 == len(self.layers)
            narrowed = last and step.wanted is not None and index not in layers
            if narrowed:  # K and V are stored; later operations do not use the other rows
                assert step.wanted is not None
                q, residual, step = q[logits_index], residual[logits_index], step.wanted
            x = self._sum(linear(self.attend(index, q, call, step), *layer.output))
            x, residual = kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._sum(self.feed_forward(x, layer.feed_forward))
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
        if self._group is not None:
            logits = gather_logits(self._group, logits, self._vocab_size)
        return logits, tuple(taps[index] for index in layers)

    def _sum(self, x: Tensor) -> Tensor:
        """Add all ranks' partial sums x [..]."""
        return x if self._group is None else self._group.sum(x)

    def feed_forward(self, x: Tensor, layer: Dense | Experts) -> Tensor:
        """x [n, hidden_size], normalised -> [n, hidden_size]. May reuse x."""
        linear, silu_mul = self.linear, self._kernels.silu_mul
        if isinstance(layer, Dense):
            return linear(silu_mul(linear(x, *layer.gate_up)), *layer.down)
        found = self.experts.apply(x, linear(x, *layer.router), layer)
        shared = layer.shared
        if shared is None:
            return found
        beside = linear(silu_mul(linear(x, shared.gate_up, None)), shared.down, None)
        return found + torch.sigmoid(linear(x, shared.gate, None)) * beside

    def angles(self, step: Step) -> Angles:
        """cos and sin for the tokens of a step: of all positions where they are kept."""
        table = self._table
        if table is not None and step.max_seqlen_kv <= len(table[0]):
            return Angles(*table, by_position=True)
        return Angles(*frequencies(self.rotary, self.embedding, step.positions), by_position=False)

    def enter(self, index: int, qkv: Tensor, angles: Angles, call: StepCall) -> Tensor:
        """Split qkv [T, (Hq + 2 Hkv) * head_dim]: write keys and values, return rotated queries.

        Returns [T, num_q_heads, head_dim].
        """
        layer, step = self.layers[index], call.step
        backend, cache = call.backends[index], call.pool[index]
        weights = layer.q_norm, layer.k_norm
        if isinstance(backend, RotatingWriter):
            rotation = HeadRotation(angles.cos, angles.sin, angles.by_position, *weights, self.eps)
            return backend.write_rotated(cache, qkv, rotation, step)
        q, k, v = self._kernels.rotate(
            qkv, *angles.of(step), layer.num_q_heads, layer.num_kv_heads, *weights, self.eps
        )
        backend.write(cache, k, v, step)
        return q

    def attend(self, index: int, q: Tensor, call: StepCall, step: Step) -> Tensor:
        """[len(q), num_q_heads * head_dim]."""
        backend, cache = call.backends[index], call.pool[index]
        return backend.attend(cache, q, step, self.layers[index].params).reshape(len(q), -1)


@dataclass(frozen=True, slots=True)
class Angles:
    """cos, sin: [.., head_dim / 2], of every position, or of a step's tokens."""

    cos: Tensor
    sin: Tensor
    by_position: bool

    def of(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return cos and sin of a step's tokens."""
        if not self.by_position:
            return self.cos, self.sin
        return self.cos[step.positions], self.sin[step.positions]


def frequencies(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim / 2]: transformers' own, whose second half repeats the first."""
    cos, sin = rotary(x[None], positions[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def linear_for(weight: Tensor) -> Linear:
    """Return the product for weights [out, in] on this device; a GPU has a kernel for single rows."""
    if weight.device.type == "cuda":
        from kvant.models.fused.matvec import linear

        return linear
    return F.linear


def kernels_for(weight: Tensor, *, batch_invariant: bool = False) -> Kernels:
    """Return kernels for weight [..]: Triton's on a GPU, plain torch elsewhere and for float64."""
    if weight.device.type == "cuda" and weight.dtype is not torch.float64:
        from kvant.models.fused.triton_kernels import TritonKernels

        return TritonKernels()
    return InvariantTorchKernels() if batch_invariant else TorchKernels()


def experts_for(weight: Tensor) -> ExpertKernels:
    """Triton's for weights [..] on a GPU, plain torch elsewhere and for float64."""
    if weight.device.type == "cuda" and weight.dtype is not torch.float64:
        from kvant.models.fused.triton_experts import TritonExperts

        return TritonExperts(weight.device)
    return TorchExperts()


def _layer_of(layer: Any, plan: KVPlan) -> Layer:
    attention = layer.self_attn
    spec = plan.layers[attention.layer_idx]
    geometry = spec.geometry
    products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    name = f"{type(attention).__name__} (layer {attention.layer_idx})"
    _check_numbers(products, name)
    window = _window_of(attention)
    if window != geometry.window or geometry.sinks or geometry.softcap or not geometry.causal:
        raise EngineFault(f"{name} has the window {window}, the plan says {geometry.window}")
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=_join(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        output=(attention.o_proj.weight, attention.o_proj.bias),
        post_norm=layer.post_attention_layernorm.weight,
        feed_forward=_feed_forward_of(layer.mlp, name),
        num_q_heads=geometry.num_q_heads,
        num_kv_heads=geometry.num_kv_heads,
        params=AttentionParams(scale=attention.scaling, window=window),
    )


def _check_numbers(products: Sequence[Any], name: str) -> None:
    if any(type(product) is not nn.Linear for product in products):
        raise EngineFault(
            f"{name} is to run in Kvant's own decoder, but its weights are no numbers"
        )


def _feed_forward_of(mlp: Any, name: str) -> Dense | Experts:
    if hasattr(mlp, "experts"):
        return _experts_of(mlp, name)
    return _dense_of(mlp, name)


def _dense_of(mlp: Any, name: str) -> Dense:
    _check_numbers([mlp.gate_proj, mlp.up_proj, mlp.down_proj], name)
    return Dense(
        gate_up=_join(mlp.gate_proj, mlp.up_proj),
        down=(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def _experts_of(mlp: Any, name: str) -> Experts:
    """Return the experts of Qwen2-MoE, Qwen3-MoE or Mixtral; their weights are not moved."""
    router, experts = mlp.gate, mlp.experts
    weights = router.weight, experts.gate_up_proj, experts.down_proj
    if any(type(weight) is not nn.Parameter or not weight.is_contiguous() for weight in weights):
        raise EngineFault(f"{name} has experts in a layout that Kvant's own decoder does not read")
    mixtral = not hasattr(router, "norm_topk_prob")
    routing = Routing(
        router.num_experts, router.top_k,
        renormalise=mixtral or bool(router.norm_topk_prob), rounded=not mixtral,
    )  # fmt: skip
    shared = None
    if hasattr(mlp, "shared_expert"):
        dense = _dense_of(mlp.shared_expert, name)
        shared = Shared(mlp.shared_expert_gate.weight, dense.gate_up[0], dense.down[0])
    return Experts(
        routing, (router.weight, None), (experts.gate_up_proj, None), (experts.down_proj, None),
        shared=shared,
    )  # fmt: skip


def _window_of(attention: Any) -> int | None:
    """The window of one layer: its module's, or the config's in families with one for all layers.

    A full layer of Qwen2-MoE has none in its module, regardless of the config.
    """
    for_all = attention.config.model_type in _ONE_WINDOW
    found: int | None = getattr(attention.config if for_all else attention, "sliding_window", None)
    return found


def _join(*products: Any) -> tuple[Tensor, Tensor | None]:
    """Join several products of one input; their weights become views of the joined one."""
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
