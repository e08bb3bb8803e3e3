"""The fused forward with products of its own for steps of few tokens, in bfloat16 on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.attention.base import StepCall
from kvant.kv.spec import KVPlan
from kvant.models.forward_info import ForwardChoice
from kvant.models.fused.decoder import FusedDecoder, fuse, gates_of
from kvant.models.fused.experts import Experts
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.few_rows import FewRows, Stream
from kvant.models.fused.layers import LatentLayer, Layer, MixerLayer, Norm
from kvant.models.fused.linear import DenseLinear, Linear
from kvant.models.fused.recipe import Activation, NormKind
from kvant.models.fused.triton_experts import TritonExperts, is_single
from kvant.models.recurrent.hook import run_framed
from kvant.models.recurrent.mixers import Framed
from kvant.models.sharding.divide import Group


def make(
    module: PreTrainedModel, plan: KVPlan, choice: ForwardChoice, group: Group | None = None
) -> FewRowsDecoder:
    """Build the forward of a loaded module. EngineFault if the module does not match the plan.

    group: the ranks that share the model, whose sums lie between products and norms.
    """
    assert not choice.batch_invariant, "the plan refuses it"
    return FewRowsDecoder(fuse(module, plan, group=group), folds=group is None)


class FewRowsDecoder:
    """Steps of up to `FewRows.most_tokens` tokens by products of its own; others as `FusedDecoder`.

    Where every norm's scale may be applied behind a product, a layer has four launches beside
    attention (`_run_folded`); else, or without `folds`, norms are launches of their own, between the
    same products.
    """

    def __init__(self, fused: FusedDecoder, *, folds: bool = True) -> None:
        self._fused = fused
        model = fused.model
        one = model.norm.kind is NormKind.RMS_ONE
        self._few = FewRows(model.embedding.device, model.norm.eps, one=one)
        self._experts = TritonExperts(model.embedding.device)
        self._products = FewProducts(self._few, fused)
        self._folds = folds and model.folds_norms
        self._folds = self._folds and all(_folds(layer, one=one) for layer in model.layers)
        self._folds = self._folds and is_own(model.head) and model.norm.eps == _eps(model.layers)

    @property
    def extra_bytes(self) -> int:
        return self._fused.extra_bytes + self._few.num_bytes

    @property
    def compiled_seconds(self) -> float | None:
        return None

    def score(self, hidden: Tensor) -> Tensor:
        return self._fused.score(hidden)

    def run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits [len(logits_index), vocab_size] and outputs of `layers`, each [T, hidden_size]."""
        if not len(logits_index) <= len(input_ids) <= self._few.most_tokens:
            return self._fused.run(input_ids, call, logits_index, layers)
        if self._folds:
            return self._run_folded(input_ids, call, logits_index, layers)
        return self._fused.run_by(self._products, input_ids, call, logits_index, layers)

    def _run_folded(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step in which the products do what lies between them; logits in float32."""
        few, fused, model = self._few, self._fused, self._fused.model
        turns = fused.turns(call.step)
        norms = [*(weight_of(layer.attn_in) for layer in model.layers[1:]), weight_of(model.norm)]
        taps: dict[int, Tensor] = {}
        first = weight_of(model.layers[0].attn_in)
        stream = few.embed(input_ids, model.embedding, first)
        for index, (layer, norm) in enumerate(zip(model.layers, norms, strict=True)):
            if isinstance(layer, MixerLayer):
                assert isinstance(layer.mixer, Framed)
                mixed = run_framed(
                    layer.mixer, few.normed(stream, layer.mixer.entry, None), call, index
                )
                output: tuple[Tensor, Tensor | None] = layer.mixer.exit, None
            else:
                assert isinstance(layer, Layer), "folded layers keep keys and values"
                qkv = few.normed(stream, *numbers(layer.qkv))
                mixed = fused.attend(index, fused.enter(index, qkv, turns, call), call, call.step)
                gates, output = gates_of(qkv, layer), numbers(layer.output)
                mixed = mixed if gates is None else fused.kernels.gate_heads(mixed, gates)
            stream = few.added(mixed, *output, stream, weight_of(layer.ffn_in))
            stream = self._feed_forward(layer.feed_forward, stream, norm)
            if index in layers:
                taps[index] = stream.residual
        logits = few.normed(stream, *numbers(model.head), picked=logits_index, dtype=torch.float32)
        return fused.finish(logits), tuple(taps[index] for index in layers)

    def _feed_forward(self, layer: Dense | Experts, stream: Stream, norm: Tensor) -> Stream:
        """Add a feed-forward layer to the stream. norm: of what comes behind it."""
        few = self._few
        if isinstance(layer, Dense):
            assert isinstance(layer.activation, Activation)
            x = few.normed(stream, *numbers(layer.up), gate=layer.activation)
            return few.added(x, *numbers(layer.down), stream, norm)
        logits, residual = few.normed(stream, *layer.router), stream.residual
        choice, normed = self._experts.route(
            logits, layer.routing, residual, stream.norm_weight, self._fused.model.norm.eps
        )
        assert normed is not None
        if is_single(choice, layer, normed.dtype):
            h = self._experts.one_gate_up(normed, choice, layer)
            return few.weigh(self._experts.one_down(h, choice, layer, residual), norm)
        parts = self._experts.few(normed, choice, layer)
        total, weighted, squares = self._experts.combine_stream(parts, residual, norm)
        return Stream(total, norm, weighted, squares)


class FewProducts:
    """Products of few rows that are normalised already; any other linear layer as it computes itself."""

    def __init__(self, few: FewRows, fused: FusedDecoder) -> None:
        self._few, self._kernels = few, fused.kernels

    def plain(self, x: Tensor, linear: Linear) -> Tensor:
        return self._few.ready(x, *numbers(linear)) if is_own(linear) else linear(x)

    def gated(self, x: Tensor, linear: Linear, activation: Activation) -> Tensor:
        if is_own(linear):
            return self._few.ready(x, *numbers(linear), gate=activation)
        return self._kernels.gate(linear(x), activation)

    def head(self, x: Tensor, linear: Linear) -> Tensor:
        if is_own(linear):
            return self._few.ready(x, *numbers(linear), dtype=torch.float32)
        return linear(x)


def is_own(linear: Linear) -> bool:
    """Whether the kernels for few rows read this weight: numbers, and rows in pairs."""
    if not isinstance(linear, DenseLinear):
        return False
    return linear.weight.is_contiguous() and linear.rows % 2 == 0


def numbers(linear: Linear) -> tuple[Tensor, Tensor | None]:
    """The weight [rows, columns] and the bias [rows] of a linear layer that `is_own`."""
    assert isinstance(linear, DenseLinear)
    return linear.weight, linear.bias


def weight_of(norm: Norm | None) -> Tensor:
    """The weight [width] of a norm that folds."""
    assert norm is not None
    assert norm.weight is not None
    return norm.weight


def _folds(layer: Layer | LatentLayer | MixerLayer, *, one: bool) -> bool:
    """Whether kernels for few rows compute a layer whose norms can be applied behind products.

    one: whether the last norm multiplies with 1 + weight, as all of them must then.
    """
    forward = layer.feed_forward
    norms = [norm.kind is NormKind.RMS_ONE for norm in (layer.attn_in, layer.ffn_in) if norm]
    if norms != [one, one] or (one and not isinstance(forward, Dense)):
        return False
    if isinstance(layer, MixerLayer):
        if not isinstance(layer.mixer, Framed) or not layer.mixer.is_framed:
            return False
    elif isinstance(layer, LatentLayer) or not is_own(layer.qkv) or not is_own(layer.output):
        return False
    if isinstance(forward, Dense):
        own = is_own(forward.up) and is_own(forward.down)
        return own and forward.gated and isinstance(forward.activation, Activation)
    routing = forward.routing
    plain = routing.is_softmax and forward.correction is None and forward.shared is None
    return plain and routing.num_experts % 2 == 0


def _eps(layers: Sequence[Layer | LatentLayer | MixerLayer]) -> float:
    """The eps of all layers' norms; NaN where they differ."""
    found = {norm.eps for layer in layers for norm in (layer.attn_in, layer.ffn_in) if norm}
    return found.pop() if len(found) == 1 else float("nan")
