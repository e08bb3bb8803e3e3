"""The fused forward with its own matrix products for steps of few tokens, in bfloat16 on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.attention.base import StepCall
from kvant.kv.spec import KVPlan
from kvant.models.forward import ExpertBytes
from kvant.models.forward_info import ForwardChoice
from kvant.models.fused.decoder import FusedDecoder, fuse, gate, gates_of
from kvant.models.fused.experts import Experts
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.few_rows import FewRows, Stream
from kvant.models.fused.layers import LatentLayer, Layer, MixerLayer, Model, Norm
from kvant.models.fused.linear import (
    Apart,
    DenseLinear,
    Linear,
    NarrowProduct,
    apply,
    rounding_for,
)
from kvant.models.fused.recipe import Activation, NormKind
from kvant.models.fused.triton_experts import TritonExperts, Unscored, is_single
from kvant.models.recurrent.hook import run_framed
from kvant.models.recurrent.mixers import Framed
from kvant.models.sharding.divide import Group
from kvant.weights.choose import (
    MOST_FOLDED,
    begin,
    few_serves,
    multiply_gated,
    multiply_wide,
    takes_wide,
    warps_of_one,
)
from kvant.weights.cuda import few_rows as cuda
from kvant.weights.cuda import wide_rows
from kvant.weights.cuda.few_rows import Act, Beside, Kind
from kvant.weights.cuda.wide_rows import Blocks
from kvant.weights.rounding import Rows


def make(
    module: PreTrainedModel, plan: KVPlan, choice: ForwardChoice, group: Group | None = None
) -> FewRowsDecoder:
    """Builds the forward of a loaded module. Raises EngineFault if the module does not match the plan.

    group: the ranks among which the model is divided; its sums then lie between products and norms. None for
    a whole module.
    """
    assert not choice.batch_invariant, "the plan refuses it"
    return FewRowsDecoder(fuse(module, plan, group=group), folds=group is None)


class FewRowsDecoder:
    """Runs steps of up to `FewRows.most_tokens` tokens with its own products; larger ones as `FusedDecoder`.

    If every norm's scale can be applied after a product, a layer has four launches beside attention
    (`_run_folded`). Otherwise, or if `folds` is false, norms are separate launches between the same products.
    """

    def __init__(self, fused: FusedDecoder, *, folds: bool = True) -> None:
        self._fused = fused
        model = fused.model
        one = model.norm.kind is NormKind.RMS_ONE
        has_experts = all(isinstance(layer.feed_forward, Experts) for layer in model.layers)
        self._few = FewRows(model.embedding.device, model.norm.eps, one=one, overlaps=has_experts)
        self._experts = TritonExperts(model.embedding.device)
        self._products = FewProducts(self._few, fused)
        eps, alike = model.norm.eps, model.norm.eps == _eps(model.layers)
        reads_head = is_own(model.head) or isinstance(model.head, NarrowProduct)
        can_fold = folds and alike and model.folds_norms and reads_head
        self._folds, self._folds_one = (
            can_fold and all(_folds(layer, owned, one=one) for layer in model.layers)
            for owned in (is_own, _is_own_for_one)
        )
        # Several tokens with narrow weights were measured in models whose layers are all of this kind.
        self._folds_narrow = can_fold and all(
            isinstance(layer, Layer)
            and isinstance(layer.feed_forward, Dense)
            and _folds(layer, _is_own_for_few, one=one)
            for layer in model.layers
        )
        self._folded = FoldedProducts(self._few, eps, one=one)
        for layer, reader in zip(model.layers, _readers(model), strict=True):
            if isinstance(layer, Layer):
                self._begin(layer, reader, one=one)
        _begin(model.head, Kind(one=True, norm=True, plus=one) if self._folds_one else None, None)

    def _begin(self, layer: Layer, reader: Linear | None, *, one: bool) -> None:
        """Starts compiling the kernels of narrow weights in other threads.

        reader: what reads the layer's results, if known.
        """
        normed = Kind(one=True, norm=True, plus=one) if self._folds_one else None
        added = Kind(one=True, added=True) if self._folds_one else None
        forward = layer.feed_forward
        behind = wide_rows.Around(norm=True)
        summed = wide_rows.Around(added=True, weighted=True, plus=one)

        def several(
            around: wide_rows.Around, linear: Linear | None, then: Linear | None
        ) -> _Folded | None:
            return _Folded(around, linear, then) if self._folds_narrow else None

        _begin(layer.qkv, normed, several(behind, layer.qkv, None))
        _begin(layer.output, added, several(summed, None, _up(layer)))
        if isinstance(forward, Experts):
            self._experts.begin(forward, self._fused.model.embedding.dtype, added=self._folds_one)
            return
        act = _ACTS.get(forward.activation) if isinstance(forward.activation, Activation) else None
        if act is not None:
            behind = replace(behind, act=act)
            normed = normed and replace(normed, gated=True, act=act)
        _begin(forward.up, normed, several(behind, forward.up, forward.down), act)
        _begin(forward.down, added, several(summed, forward.down, reader))

    @property
    def extra_bytes(self) -> int:
        return self._fused.extra_bytes + self._few.num_bytes

    @property
    def own_weight_bytes(self) -> int:
        return 0

    @property
    def expert_bytes(self) -> tuple[ExpertBytes, ...]:
        return self._fused.expert_bytes

    @property
    def compiled_seconds(self) -> float | None:
        return None

    def score(self, hidden: Tensor) -> Tensor:
        """Implements `Forward.score`: hidden [n, hidden_size] -> logits [n, vocab_size]."""
        return self._fused.score(hidden)

    def run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Implements `Forward.run`: logits [len(logits_index), vocab_size].

        Outputs of `layers`, [T, hidden_size].
        """
        if not len(logits_index) <= len(input_ids) <= self._few.most_tokens:
            return self._fused.run(input_ids, call, logits_index, layers)
        tokens = len(input_ids)
        narrow = self._folds_narrow and tokens <= MOST_FOLDED
        if self._folds or narrow or (self._folds_one and tokens == 1):
            return self._run_folded(input_ids, call, logits_index, layers)
        return self._fused.run_by(self._products, input_ids, call, logits_index, layers)

    def _run_folded(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Implements `run` with products that include the norms, sums and activations around them."""
        few, fused, model, folded = self._few, self._fused, self._fused.model, self._folded
        turns = fused.turns(call.step)
        norms = [*(weight_of(layer.attn_in) for layer in model.layers[1:]), weight_of(model.norm)]
        taps: dict[int, Tensor] = {}
        first = weight_of(model.layers[0].attn_in)
        blocks = _takes_blocks(_entry(model.layers[0]), len(input_ids))
        if model.table is None:
            stream = few.embed(input_ids, model.embedding, first, blocks=blocks)
        else:
            stream = few.weigh(fused.embed(input_ids), first, blocks=blocks)
        behind = zip(model.layers, norms, _readers(model), strict=True)
        for index, (layer, norm, reader) in enumerate(behind):
            if isinstance(layer, MixerLayer):
                assert isinstance(layer.mixer, Framed)
                mixed = run_framed(
                    layer.mixer, few.normed(stream, layer.mixer.entry, None), call, index
                )
                exit = layer.mixer.exit
                stream = few.added(mixed, exit, None, stream, weight_of(layer.ffn_in))
            else:
                assert isinstance(layer, Layer), "folded layers keep keys and values"
                qkv = folded.normed(stream, layer.qkv)
                mixed = fused.mix(index, qkv, turns, call)
                gates = gates_of(qkv, layer)
                mixed = mixed if gates is None else fused.kernels.gate_heads(mixed, gates)
                norm_weight = weight_of(layer.ffn_in)
                stream = folded.added(mixed, layer.output, stream, norm_weight, _up(layer))
            stream = self._feed_forward(layer.feed_forward, stream, norm, reader)
            if index in layers:
                taps[index] = stream.residual
        if is_own(model.head):
            head = numbers(model.head)
            logits = few.normed(stream, *head, picked=logits_index, dtype=torch.float32)
        elif len(input_ids) == len(logits_index) == 1 and _is_own_for_one(model.head):
            logits = folded.normed(stream, model.head)
        else:
            logits = model.head(fused.kernels.norm(stream.residual[logits_index], model.norm))
        return fused.finish(logits), tuple(taps[index] for index in layers)

    def _feed_forward(
        self, layer: Dense | Experts, stream: Stream, norm: Tensor, reader: Linear | None
    ) -> Stream:
        """Adds a feed-forward layer to the stream.

        norm: weight [width] of the next norm, whose results `reader` multiplies.
        """
        few = self._few
        if isinstance(layer, Dense):
            assert isinstance(layer.activation, Activation)
            x = self._folded.gated(stream, layer.up, layer.activation, layer.down)
            return self._folded.added(x, layer.down, stream, norm, reader)
        residual, norm_weight = stream.residual, stream.norm_weight
        eps = self._fused.model.norm.eps
        if self._experts.chooses_itself(len(residual), layer, residual.dtype):
            scores = few.normed(stream, *layer.router)
            return few.weigh(self._experts.alone(residual, norm_weight, eps, scores, layer), norm)
        logits: Tensor | Unscored
        if isinstance(stream.weighted, Tensor) and self._experts.multiplies(layer.router[0]):
            logits = Unscored(stream.weighted, layer.router)
        else:
            logits = few.normed(stream, *layer.router)
        choice, normed = self._experts.route(logits, layer.routing, residual, norm_weight, eps)
        assert normed is not None
        if is_single(choice, layer, normed.dtype):
            h = self._experts.one_gate_up(normed, choice, layer)
            return few.weigh(self._experts.one_down(h, choice, layer, residual), norm)
        parts = self._experts.few(normed, choice, layer)
        total, weighted, squares = self._experts.combine_stream(parts, residual, norm)
        return Stream(total, norm, weighted, squares)


class FoldedProducts:
    """Folded products: by `FewRows` for unquantised weights; by CUDA for narrow weights."""

    def __init__(self, few: FewRows, eps: float, *, one: bool) -> None:
        self._few, self._eps, self._plus = few, eps, one

    def normed(self, stream: Stream, linear: Linear) -> Tensor:
        """Implements `FewRows.normed` for any weight: returns [T, rows]."""
        if isinstance(linear, Apart):
            return self._beside_each_other(stream, linear)
        if not isinstance(linear, NarrowProduct):
            return self._few.normed(stream, *numbers(linear))
        if stream.weighted is not None:
            return self._behind_norm(stream, stream.weighted, linear, wide_rows.Around()).rows
        beside = Beside(norm_weight=stream.norm_weight, eps=self._eps)
        kind = Kind(one=True, norm=True, plus=self._plus)
        return _one_row(stream.residual, linear, kind, beside)

    def gated(
        self, stream: Stream, linear: Linear, gate: Activation, reader: Linear
    ) -> Tensor | Blocks:
        """Implements `FewRows.normed` with a gate, for any weight.

        Returns [T, rows / 2], in blocks if `reader`, the next product, takes them.
        """
        if not isinstance(linear, NarrowProduct):
            return self._few.normed(stream, *numbers(linear), gate=gate)
        if stream.weighted is not None:
            around = wide_rows.Around(
                act=_ACTS[gate], makes_blocks=_takes_blocks(reader, len(stream.weighted))
            )
            return self._behind_norm(stream, stream.weighted, linear, around).out
        kind = Kind(one=True, norm=True, plus=self._plus, gated=True, act=_ACTS[gate])
        beside = Beside(norm_weight=stream.norm_weight, eps=self._eps)
        return _one_row(stream.residual, linear, kind, beside)

    def _behind_norm(
        self, stream: Stream, x: Tensor | Blocks, linear: NarrowProduct, around: wide_rows.Around
    ) -> wide_rows.Found:
        around = replace(around, norm=True, takes_blocks=isinstance(x, Blocks))
        behind = wide_rows.Beside(squares=stream.squares, eps=self._eps)
        return multiply_wide(x, linear.weight, linear.bias, around, behind)

    def _beside_each_other(self, stream: Stream, linear: Apart) -> Tensor:
        """Multiplies one row by weights of different formats; each fills its columns of the result."""
        out = stream.residual.new_empty(1, linear.rows)
        kind = Kind(one=True, norm=True, plus=self._plus)
        beside = Beside(norm_weight=stream.norm_weight, eps=self._eps)
        start = 0
        for part in linear.parts:
            assert isinstance(part, NarrowProduct)
            _one_row(stream.residual, part, kind, beside, out[:, start : start + part.rows])
            start += part.rows
        return out

    def added(
        self,
        x: Tensor | Blocks,
        linear: Linear,
        stream: Stream,
        norm_weight: Tensor,
        reader: Linear | None,
    ) -> Stream:
        """Implements `FewRows.added` for any weight.

        x: [T, columns]. norm_weight: [width], of the next norm. reader: the product behind that norm.
        """
        x = x.contiguous() if isinstance(x, Tensor) else x
        if stream.weighted is not None and isinstance(linear, NarrowProduct):
            around = wide_rows.Around(
                added=True, weighted=True, plus=self._plus, takes_blocks=isinstance(x, Blocks),
                makes_blocks=_takes_blocks(reader, len(x)),
            )  # fmt: skip
            summed = wide_rows.Beside(residual=stream.residual, norm_weight=norm_weight)
            found = multiply_wide(x, linear.weight, linear.bias, around, summed)
            return Stream(found.rows, norm_weight, found.weighted, found.squares)
        assert isinstance(x, Tensor), "only `multiply_wide` takes blocks"
        if not isinstance(linear, NarrowProduct):
            return self._few.added(x, *numbers(linear), stream, norm_weight)
        kind, beside = Kind(one=True, added=True), Beside(residual=stream.residual)
        return Stream(_one_row(x, linear, kind, beside), norm_weight)


def _takes_blocks(linear: Linear | None, tokens: int) -> bool:
    """Whether the product of this many rows with this weight reads x in blocks."""
    return isinstance(linear, NarrowProduct) and wide_rows.takes_blocks(
        linear.weight.format, tokens
    )


@dataclass(frozen=True, slots=True)
class _Folded:
    """What is folded into a product. linear: its weight, if x may be in blocks. reader: of the results."""

    around: wide_rows.Around
    linear: Linear | None
    reader: Linear | None

    def __call__(self, tokens: int) -> wide_rows.Around:
        """Returns what is folded into a product of this many rows."""
        takes, makes = (_takes_blocks(one, tokens) for one in (self.linear, self.reader))
        return replace(self.around, takes_blocks=takes, makes_blocks=makes)


def _entry(layer: Layer | LatentLayer | MixerLayer) -> Linear | None:
    """Returns the product that reads a layer's input, if `FoldedProducts` computes it."""
    return layer.qkv if isinstance(layer, Layer) else None


def _up(layer: Layer) -> Linear | None:
    """Returns the product that reads the sum behind a layer's attention, if `FoldedProducts` computes it."""
    return layer.feed_forward.up if isinstance(layer.feed_forward, Dense) else None


def _readers(model: Model) -> list[Linear | None]:
    """Returns what reads each layer's results: the next layer's first product, or the head."""
    return [*(_entry(layer) for layer in model.layers[1:]), model.head]


def _begin(
    linear: Linear, one: Kind | None, around: _Folded | None, act: Act | None = None
) -> None:
    """Starts compiling a narrow weight's kernels.

    one, around: operations folded into products of a single row, and of several rows.
    """
    if isinstance(linear, Apart):
        for part in linear.parts:
            _begin(part, one, around, act)
    if isinstance(linear, NarrowProduct):
        begin(
            linear.weight, torch.bfloat16, bias=linear.bias is not None, act=act, one=one,
            around=around,
        )  # fmt: skip


def _one_row(
    x: Tensor, linear: NarrowProduct, kind: Kind, beside: Beside, out: Tensor | None = None
) -> Tensor:
    cut = warps_of_one(linear.weight.format, linear.columns, linear.rows)
    return cuda.multiply(x, linear.weight, linear.bias, cut, kind, beside, out=out)


_ACTS = {Activation.SILU: Act.SILU, Activation.GELU_TANH: Act.GELU_TANH}


def _is_own_for_one(linear: Linear) -> bool:
    """Whether kernels that fold norms multiply a single row by this weight, unquantised or narrow."""
    if isinstance(linear, Apart):
        narrow = all(isinstance(part, NarrowProduct) for part in linear.parts)
        return narrow and all(_is_own_for_one(part) for part in linear.parts)
    if isinstance(linear, NarrowProduct):
        weight = linear.weight
        if weight.order is not None:
            return False  # another launch reorders what the norm returns
        return few_serves(weight.format, weight.rows, weight.columns, torch.bfloat16)
    return is_own(linear)


def _is_own_for_few(linear: Linear) -> bool:
    """Whether kernels that fold norms multiply 2 to 64 rows by this weight."""
    if not isinstance(linear, NarrowProduct):
        return is_own(linear)
    if linear.weight.order is not None:
        return False
    fmt, shape = linear.weight.format, linear.weight.shape
    return takes_wide(fmt, FewRows.most_tokens, *shape, torch.bfloat16) and few_serves(
        fmt, *shape, torch.bfloat16
    )


class FewProducts:
    """Products of few normalised rows by unquantised weights.

    Other linear layers compute theirs themselves.
    """

    def __init__(self, few: FewRows, fused: FusedDecoder) -> None:
        self._few, self._kernels = few, fused.kernels

    def plain(self, x: Rows, linear: Linear) -> Tensor:
        if isinstance(x, Tensor) and is_own(linear):
            return self._few.ready(x, *numbers(linear))
        return apply(linear, x)

    def gated(self, x: Rows, linear: Linear, activation: Activation, reader: Linear) -> Rows:
        if isinstance(x, Tensor) and is_own(linear):
            return self._few.ready(x, *numbers(linear), gate=activation)
        is_rounded = rounding_for(linear, len(x)) is not None
        if isinstance(linear, NarrowProduct) and activation in _ACTS and not is_rounded:
            assert isinstance(x, Tensor)
            found = multiply_gated(x, linear.weight, linear.bias, _ACTS[activation])
            if found is not None:
                return found
        return gate(self._kernels, apply(linear, x), activation, reader)

    def head(self, x: Tensor, linear: Linear) -> Tensor:
        """Implements `Products.head`: x [T, columns] -> [T, rows]; float32 from the kernels for few rows."""
        if is_own(linear):
            return self._few.ready(x, *numbers(linear), dtype=torch.float32)
        return linear(x)


def is_own(linear: Linear) -> bool:
    """Whether the kernels for few rows read this weight: unquantised, contiguous, an even number of rows."""
    if not isinstance(linear, DenseLinear):
        return False
    return linear.weight.is_contiguous() and linear.rows % 2 == 0


def numbers(linear: Linear) -> tuple[Tensor, Tensor | None]:
    """Returns the weight [rows, columns] and the bias [rows] of a linear layer for which `is_own` holds."""
    assert isinstance(linear, DenseLinear)
    return linear.weight, linear.bias


def weight_of(norm: Norm | None) -> Tensor:
    """Returns the weight [width] of a norm that can be folded into products."""
    assert norm is not None
    assert norm.weight is not None
    return norm.weight


def _folds(
    layer: Layer | LatentLayer | MixerLayer, is_own: Callable[[Linear], bool], *, one: bool
) -> bool:
    """Whether the kernels for few rows compute this layer with its norms folded into products.

    one: whether the last norm multiplies by 1 + weight; all norms must then do so.
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
        own = is_own(forward.up) and is_own(forward.down) and forward.gated
        own = own and not isinstance(forward.up, Apart)
        known = isinstance(forward.up, DenseLinear) or forward.activation in _ACTS
        return own and known and isinstance(forward.activation, Activation)
    routing = forward.routing
    plain = routing.is_softmax and forward.correction is None and forward.shared is None
    return plain and routing.num_experts % 2 == 0


def _eps(layers: Sequence[Layer | LatentLayer | MixerLayer]) -> float:
    """Returns the eps of all layers' norms; NaN if they differ."""
    found = {norm.eps for layer in layers for norm in (layer.attn_in, layer.ffn_in) if norm}
    return found.pop() if len(found) == 1 else float("nan")
