"""The fused forward with products of its own for steps of few tokens, in bfloat16 on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.attention.base import StepCall
from kvant.errors import EngineFault
from kvant.kv.spec import KVPlan
from kvant.models.forward_info import ForwardChoice
from kvant.models.fused.decoder import Dense, FusedDecoder, Layer, fuse
from kvant.models.fused.experts import Experts
from kvant.models.fused.few_rows import FewRows, Stream
from kvant.models.fused.triton_experts import TritonExperts


def make(module: PreTrainedModel, plan: KVPlan, choice: ForwardChoice) -> FewRowsDecoder:
    """Build the forward of a loaded module. EngineFault if the module does not match the plan."""
    assert not choice.batch_invariant, "the plan refuses it"
    fused = fuse(module, plan)
    weights = [weight for layer in fused.layers for weight in _weights(layer)]
    if any(not w.is_contiguous() or w.shape[0] % 2 for w in (*weights, fused.head)):
        raise EngineFault(
            f"{type(module).__name__} has weights that rows cannot be read from in pairs"
        )
    return FewRowsDecoder(fused)


class FewRowsDecoder:
    """Steps of up to `FewRows.most_tokens` tokens by four products a layer; others as `FusedDecoder`."""

    def __init__(self, fused: FusedDecoder) -> None:
        self._fused = fused
        self._few = FewRows(fused.embedding.device, fused.eps)
        self._experts = TritonExperts(fused.embedding.device)

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
        if len(logits_index) <= len(input_ids) <= self._few.most_tokens:
            return self._run_few(input_ids, call, logits_index, layers)
        return self._fused.run(input_ids, call, logits_index, layers)

    def _run_few(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step in which the products do what lies between them; logits in float32."""
        few, fused = self._few, self._fused
        angles = fused.angles(call.step)
        norms = [*(layer.input_norm for layer in fused.layers[1:]), fused.norm]
        taps: dict[int, Tensor] = {}
        stream = few.embed(input_ids, fused.embedding, fused.layers[0].input_norm)
        for index, (layer, norm) in enumerate(zip(fused.layers, norms, strict=True)):
            q = fused.enter(index, few.normed(stream, *layer.qkv), angles, call)
            attended = fused.attend(index, q, call, call.step)
            stream = few.added(attended, *layer.output, stream, layer.post_norm)
            stream = self._feed_forward(layer.feed_forward, stream, norm)
            if index in layers:
                taps[index] = stream.residual
        logits = few.normed(
            stream, fused.head, fused.head_bias, picked=logits_index, dtype=torch.float32
        )
        return logits, tuple(taps[index] for index in layers)

    def _feed_forward(self, layer: Dense | Experts, stream: Stream, norm: Tensor) -> Stream:
        """Add a feed-forward layer to the stream. norm: of what comes behind it."""
        few = self._few
        if isinstance(layer, Dense):
            x = few.normed(stream, *layer.gate_up, gated=True)
            return few.added(x, *layer.down, stream, norm)
        logits, residual = few.normed(stream, *layer.router), stream.residual
        choice, normed = self._experts.route(
            logits, layer.routing, residual, stream.norm_weight, self._fused.eps
        )
        assert normed is not None
        if stream.weighted is None:
            h = self._experts.one_gate_up(normed, choice, layer)
            return Stream(self._experts.one_down(h, choice, layer, residual), norm)
        parts = self._experts.few(normed, choice, layer)
        total, weighted, squares = self._experts.combine_stream(parts, residual, norm)
        return Stream(total, norm, weighted, squares)


def _weights(layer: Layer) -> list[Tensor]:
    forward = layer.feed_forward
    if isinstance(forward, Dense):
        return [layer.qkv[0], layer.output[0], forward.gate_up[0], forward.down[0]]
    return [layer.qkv[0], layer.output[0], forward.router[0]]
