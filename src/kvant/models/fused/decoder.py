"""Kvant's own decoder over packed tokens: one loop for every family in the table of recipes.

It runs the weights of a loaded transformers module. One matrix product computes q, k and v, another gate and
up, with few launches between them. What differs between families is data (`kvant.models.fused.layers`),
which the family's recipe reads from the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from kvant.attention.base import (
    AttentionBackend,
    HeadNorm,
    HeadRotation,
    RotatingWriter,
    Step,
    StepCall,
)
from kvant.errors import EngineFault
from kvant.kv.spec import KVPlan
from kvant.models.forward import ExpertBytes
from kvant.models.forward_info import ForwardChoice
from kvant.models.fused import latent
from kvant.models.fused.experts import ExpertKernels, Experts, TorchExperts
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.info import MOST_ANGLES
from kvant.models.fused.kernels import InvariantTorchKernels, Kernels, TorchKernels
from kvant.models.fused.layers import LatentLayer, Layer, MixerLayer, Model, Norm, QKNorms
from kvant.models.fused.linear import (
    DenseLinear,
    Linear,
    Multiply,
    apply,
    multiply_for,
    plain,
    rounding_for,
)
from kvant.models.fused.read import decoder_of, read_model
from kvant.models.fused.recipe import Activation, Angles, NormKind, Pairing
from kvant.models.fused.recipes import recipe_of
from kvant.models.invariant.linear import TiledLinear, prove_all
from kvant.models.invariant.vectors import by_whole_vectors
from kvant.models.recurrent.hook import run_mixer
from kvant.models.recurrent.mixers import Framed
from kvant.models.sharding.divide import Group, gather_logits
from kvant.weights.linear import numbers_of_rows
from kvant.weights.rounding import Rows

_FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary embeddings whose frequencies depend on a token's own position alone."""

_HEAD_NORMS = {
    NormKind.RMS: HeadNorm.ROUNDED,
    NormKind.RMS_WIDE: HeadNorm.WIDE,
    NormKind.RMS_ONE: HeadNorm.ONE,
}


class Products(Protocol):
    """Multiplies the rows of a step by stored weights."""

    def plain(self, x: Rows, linear: Linear) -> Tensor:
        """Returns the product [T, rows] of x [T, columns]."""
        ...

    def gated(self, x: Rows, linear: Linear, activation: Activation, reader: Linear) -> Rows:
        """Returns activation(gate) * up, [T, rows / 2], of the product.

        Rounded if `reader` takes rounded rows.
        """
        ...

    def head(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns logits [T, rows] of x [T, columns], in the dtype of x or a wider one."""
        ...


@dataclass(frozen=True, slots=True)
class AnyProducts:
    """Products that each linear layer computes itself."""

    kernels: Kernels

    def plain(self, x: Rows, linear: Linear) -> Tensor:
        return apply(linear, x)

    def gated(self, x: Rows, linear: Linear, activation: Activation, reader: Linear) -> Rows:
        return gate(self.kernels, apply(linear, x), activation, reader)

    def head(self, x: Tensor, linear: Linear) -> Tensor:
        """Implements `Products.head`: x [T, columns] -> [T, rows]."""
        return linear(x)


def gate(kernels: Kernels, gate_up: Tensor, activation: Activation, reader: Linear) -> Rows:
    """Returns `Kernels.gate` of gate_up [T, 2 * width], rounded if `reader` multiplies rounded rows."""
    rounding = rounding_for(reader, len(gate_up))
    if rounding is None:
        return kernels.gate(gate_up, activation)
    return kernels.gate_rounded(gate_up, activation, rounding)


def make(
    module: PreTrainedModel, plan: KVPlan, choice: ForwardChoice, group: Group | None = None
) -> FusedDecoder:
    """Builds the fused forward of a loaded module.

    Raises EngineFault if the module does not match the plan.
    """
    return fuse(module, plan, batch_invariant=choice.batch_invariant, group=group)


def fuse(
    module: PreTrainedModel,
    plan: KVPlan,
    *,
    batch_invariant: bool = False,
    group: Group | None = None,
    joins: bool = True,
) -> FusedDecoder:
    """Builds the fused forward of a loaded module.

    The module's parameters become views of the fused ones, so no weight is stored twice. batch_invariant: no
    row's result depends on the other rows of a step. group: the ranks among which the model is divided; None
    for a whole module. joins: whether weights of one input are joined now; else when they are read. Raises
    EngineFault if the decoder cannot compute the module exactly.
    """
    config = module.config.get_text_config(decoder=True)
    recipe = recipe_of(config.model_type)
    if recipe is None:
        raise EngineFault(
            f"the plan runs {type(module).__name__} through Kvant's own decoder, which has no "
            f"recipe for {config.model_type}"
        )
    embedding: Any = module.get_input_embeddings()
    tiled = TiledLinear() if batch_invariant else None
    if tiled is not None:
        prove_all(tiled, module)
    fastest = multiply_for(embedding.weight) if joins else plain
    model, arguments = read_model(module, recipe, plan, fastest if tiled is None else tiled)
    if tiled is not None:
        latent.prove(tiled, model)
        for layer in model.layers:
            if isinstance(layer, MixerLayer) and isinstance(layer.mixer, Framed):
                for weight in (
                    (layer.mixer.entry, layer.mixer.exit) if layer.mixer.is_framed else ()
                ):
                    tiled.prove(weight)
    rotary = getattr(decoder_of(module), "rotary_emb", None)
    sources = tuple(AngleSource(rotary, one, recipe.attention.angles) for one in arguments)
    most = min(getattr(config, "max_position_embeddings", None) or MOST_ANGLES, MOST_ANGLES)
    return FusedDecoder(model, sources, most, tiled, Ranks.of(group, config))


class FusedDecoder:
    """The forward of a whole model. A run changes only pools of keys, values and states.

    sources: rotary angles, indexed by `Layer.rotary`. most_angles: number of positions whose angles a GPU
    keeps. tiled: the batch-invariant matrix product, None for the fastest one. ranks: the ranks among which
    the model is divided.
    """

    def __init__(
        self,
        model: Model,
        sources: Sequence[AngleSource],
        most_angles: int,
        tiled: TiledLinear | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self._ranks = ranks
        self.kernels = kernels_for(model.embedding, batch_invariant=tiled is not None)
        self.experts = experts_for(model.embedding, tiled)
        self._multiply: Multiply = multiply_for(model.embedding) if tiled is None else tiled
        self._is_invariant = tiled is not None
        self._products = AnyProducts(self.kernels)
        self._per_head = latent.per_head if tiled is None else latent.each_head_by(tiled)
        self._has_latents = any(isinstance(layer, LatentLayer) for layer in model.layers)
        self._sources = tuple(sources)
        self._nothing = Turns.none(model.embedding)
        self._kept = tuple(self._table(source, most_angles) for source in self._sources)

    def _table(self, source: AngleSource, most: int) -> Turns | None:
        """Returns the angles of all positions on a GPU; None on a CPU or if they depend on other tokens."""
        if self.model.embedding.device.type == "cpu" or not source.is_fixed:
            return None
        places = torch.arange(most, device=self.model.embedding.device)
        with torch.no_grad():
            return Turns(*source.angles(self.model.embedding, places), by_position=True)

    @property
    def extra_bytes(self) -> int:
        """Bytes of the tables of angles."""
        kept = [
            part for turns in self._kept if turns is not None for part in (turns.cos, turns.sin)
        ]
        return sum(part.numel() * part.element_size() for part in kept)

    @property
    def own_weight_bytes(self) -> int:
        return 0

    @property
    def expert_bytes(self) -> tuple[ExpertBytes, ...]:
        forwards = (layer.feed_forward for layer in self.model.layers)
        return tuple(one.bytes for one in forwards if isinstance(one, Experts))

    @property
    def compiled_seconds(self) -> float | None:
        return None

    def score(self, hidden: Tensor) -> Tensor:
        """Implements `Forward.score`: hidden [n, hidden_size] -> logits [n, vocab_size]."""
        return self._gathered(self.model.head(hidden))

    def finish(self, logits: Tensor) -> Tensor:
        """Scales and caps logits [n, vocab_size]."""
        model = self.model
        if model.logits_scale != 1.0:
            logits = logits * model.logits_scale
        if model.logits_cap:
            capped = logits / model.logits_cap
            logits = model.logits_cap * self.kernels.tanh(capped)
        return logits

    def run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns logits [len(logits_index), vocab_size] and outputs of `layers`, each [T, hidden_size]."""
        return self.run_by(self._products, input_ids, call, logits_index, layers)

    def run_by(
        self,
        products: Products,
        input_ids: Tensor,
        call: StepCall,
        logits_index: Tensor,
        layers: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Implements `run` with the given products. input_ids: [T] int64; logits_index: [n] int64."""
        kernels, model, step = self.kernels, self.model, call.step
        residual = self.embed(input_ids)
        turns = self.turns(step)
        taps: dict[int, Tensor] = {}
        first = model.layers[0].attn_in
        x: Rows = residual if first is None else kernels.norm(residual, first)
        for index, layer in enumerate(model.layers):
            last, is_summed, narrowed = index + 1 == len(model.layers), False, False
            if isinstance(layer, MixerLayer):
                assert isinstance(x, Tensor)
                y = run_mixer(
                    layer.mixer, x, call, index,
                    lambda x, w, b: products.plain(x, DenseLinear(w, b, self._multiply)),
                )  # fmt: skip
            else:
                narrowed = last and step.wanted is not None and index not in layers
                gate: Tensor | None = None
                q: Tensor | None = None
                if isinstance(layer, LatentLayer):
                    assert isinstance(x, Tensor)
                    q = self.enter_latent(index, x, layer, products, turns, call)
                else:
                    qkv = products.plain(x, layer.qkv)
                    gate = gates_of(qkv, layer)
                    if narrowed:
                        q = self.enter(index, qkv, turns, call)
                if narrowed:  # K and V are stored; later operations do not use the other rows
                    assert step.wanted is not None
                    assert q is not None
                    q, residual = q[logits_index], residual[logits_index]
                    x = x[logits_index] if isinstance(x, Tensor) else x
                    gate = None if gate is None else gate[logits_index]
                    step = step.wanted
                if q is None:
                    attended = self.mix(index, qkv, turns, call)
                else:
                    attended = self.attend(index, q, call, step)
                if gate is not None:
                    attended = kernels.gate_heads(attended, gate)
                y = products.plain(attended, layer.output)
            if model.parallel:
                if layer.ffn_in is not None:
                    x = kernels.norm(residual, layer.ffn_in)
                y = y + self.feed_forward(x, layer.feed_forward, products)
            else:
                x, residual = self._add_norm(
                    y, residual, layer.ffn_in, before=layer.attn_out, factor=layer.factor,
                    reader=_reader(layer.feed_forward),
                )  # fmt: skip
                y = self.feed_forward(x, layer.feed_forward, products)
            norm = model.norm if last else model.layers[index + 1].attn_in
            if index in layers:
                y, is_summed = self._sum(y), True
            if last and index in layers:
                _, taps[index] = kernels.add_norm(
                    y.clone(), residual.clone(), None, before=layer.ffn_out, factor=layer.factor
                )
            if last and not narrowed:
                y, residual = y[logits_index], residual[logits_index]
            x, residual = self._add_norm(
                y, residual, norm, before=layer.ffn_out, factor=layer.factor, is_summed=is_summed,
                reader=None if last or model.parallel else _reader(model.layers[index + 1]),
            )  # fmt: skip
            if index in layers and not last:
                taps[index] = residual.clone()  # the next layers add to it in place
        assert isinstance(x, Tensor)
        logits = self.finish(self._gathered(products.head(x, model.head)))
        return logits, tuple(taps[index] for index in layers)

    def _add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm | None,
        *,
        before: Norm | None,
        factor: float,
        is_summed: bool = False,
        reader: Linear | None = None,
    ) -> tuple[Rows, Tensor]:
        """Sums x [T, width] over ranks, unless is_summed, and returns `Kernels.add_norm` of the sum.

        reader: the only product that reads the normalised rows; they are rounded if it multiplies rounded
        rows.
        """
        if self._ranks is not None and not is_summed:
            plain = before is None and factor == 1.0 and norm is not None
            if plain and norm is not None and norm.kind is NormKind.RMS and norm.weight is not None:
                found = self._ranks.group.sum_add_norm(x, residual, norm.weight, norm.eps)
                if found is not None:
                    return found
            x = self._ranks.group.sum(x)
        rounding = None if reader is None else rounding_for(reader, len(x))
        if norm is None or rounding is None:
            return self.kernels.add_norm(x, residual, norm, before=before, factor=factor)
        return self.kernels.add_norm_rounded(
            x, residual, norm, rounding, before=before, factor=factor
        )

    def _gathered(self, logits: Tensor) -> Tensor:
        """Joins logits [n, rows of this rank's part of the head] of all ranks into [n, vocab_size]."""
        if self._ranks is None:
            return logits
        return gather_logits(self._ranks.group, logits, self._ranks.vocab_size)

    def _sum(self, x: Tensor) -> Tensor:
        """Sums x [..] over all ranks."""
        return x if self._ranks is None else self._ranks.group.sum(x)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Returns embeddings [T, hidden_size], scaled, of token ids [T] int64. The caller may change them."""
        table, dtype = self.model.table, self.model.embedding.dtype
        if table is None:
            found = F.embedding(input_ids, self.model.embedding)
        else:
            found = numbers_of_rows(table, input_ids, dtype)
        return found if self.model.embed_scale == 1.0 else found * self.model.embed_scale

    def feed_forward(self, x: Rows, layer: Dense | Experts, products: Products) -> Tensor:
        """Applies a feed-forward layer to normalised rows x [n, hidden_size].

        Returns a new [n, hidden_size].
        """
        if isinstance(layer, Dense):
            return self._dense(x, layer, products)
        assert isinstance(x, Tensor)
        found = self.experts.apply(x, self._logits_of(x, layer), layer)
        shared = layer.shared
        if shared is None:
            return found
        beside = self._dense(x, shared.dense, products)
        if shared.gate is not None:
            beside = self.kernels.sigmoid(shared.gate(x)) * beside
        return found + beside

    def _logits_of(self, x: Tensor, layer: Experts) -> Tensor:
        """Returns the router's logits [n, num_experts] of x [n, hidden_size]; float32 with `Routing.wide`."""
        weight, bias = layer.router
        if not layer.routing.wide:
            return self._multiply(x.to(weight.dtype), weight, bias)
        if x.is_cuda and bias is None and x.dtype == weight.dtype and not self._is_invariant:
            # Products of 16 bits are exact in float32, so neither side need be converted.
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return self._multiply(x.to(torch.float32), weight.to(torch.float32), bias)

    def _dense(self, x: Rows, layer: Dense, products: Products) -> Tensor:
        activation = layer.activation
        if not isinstance(activation, Activation):
            return products.plain(activation(products.plain(x, layer.up)), layer.down)
        if layer.gated:
            return products.plain(products.gated(x, layer.up, activation, layer.down), layer.down)
        x = self.kernels.activate(products.plain(x, layer.up), activation)
        return products.plain(x, layer.down)

    def turns(self, step: Step, like: Tensor | None = None) -> tuple[Turns, ...]:
        """Returns the rotary angles of a step's tokens, one entry for each kind of angles in the model.

        An entry holds all positions if they are kept, except in models with latent layers: these need the
        angles of the step's tokens, which are then picked once for all layers. like [..]: has the angles'
        dtype; None for the dtype of embeddings.
        """
        found = []
        like = self.model.embedding if like is None else like
        for source, kept in zip(self._sources, self._kept, strict=True):
            if kept is not None and step.max_seqlen_kv <= len(kept.cos):
                found.append(
                    Turns(*kept.of(step), by_position=False) if self._has_latents else kept
                )
            else:
                angles = source.angles(like, step.positions)
                found.append(Turns(*angles, by_position=False))
        return tuple(found)

    def mix(self, index: int, qkv: Tensor, turns: Sequence[Turns], call: StepCall) -> Tensor:
        """Writes keys and values of qkv [T, (Hq + 2 Hkv) * head_dim], and attends with its queries.

        qkv: as in `enter`. Returns [T, num_q_heads * head_dim].
        """
        layer, step = self.model.layers[index], call.step_of(index)
        assert isinstance(layer, Layer)
        backend, cache = call.backends[index], call.pool[index]
        heads = self._heads(layer, qkv, turns, backend)
        if isinstance(backend, RotatingWriter) and heads.rotation and layer.position_scale is None:
            found = backend.attend_rotated(cache, heads.qkv, heads.rotation, step, layer.params)
            if found is not None:
                return found.reshape(len(qkv), -1)
        return self.attend(index, self._entered(index, heads, call), call, call.step)

    def enter(self, index: int, qkv: Tensor, turns: Sequence[Turns], call: StepCall) -> Tensor:
        """Splits qkv [T, (Hq + 2 Hkv) * head_dim], writes keys and values, and returns rotated queries.

        qkv of a gated layer has Hq heads more, its gates. Returns [T, num_q_heads, head_dim].
        """
        layer = self.model.layers[index]
        assert isinstance(layer, Layer)
        return self._entered(index, self._heads(layer, qkv, turns, call.backends[index]), call)

    def _heads(
        self, layer: Layer, qkv: Tensor, turns: Sequence[Turns], backend: AttentionBackend
    ) -> _Heads:
        """Prepares qkv [T, (Hq + 2 Hkv) * head_dim] of a layer for its rotation, by the backend if it can."""
        norms, turn = layer.qk_norms, self._nothing
        rotates = isinstance(backend, RotatingWriter)
        by_heads = norms is None or norms.of_heads
        gated = layer.gated and by_heads and rotates
        if layer.gated and not gated:
            qkv = without_gates(qkv, layer)
        if layer.by_head:
            parts = qkv.view(len(qkv), layer.num_q_heads, 3, layer.head_dim).transpose(1, 2)
            qkv = parts.reshape(qkv.shape)
        if layer.rotary is not None:
            turn = turns[layer.rotary]
        if norms is not None and norms.whole:
            widths = layer.num_q_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
            qkv, norms = self.kernels.norm_whole(qkv, *widths, norms), None
        if layer.clip is not None:
            qkv = qkv.clamp(-layer.clip, layer.clip)
        rotation = None
        if rotates and (norms is None or norms.of_heads):
            rotation = HeadRotation(
                turn.cos, turn.sin, turn.by_position,
                q_weight=None if norms is None else norms.q.weight,
                k_weight=None if norms is None else norms.k.weight,
                eps=0.0 if norms is None else norms.q.eps,
                norm=HeadNorm.ROUNDED if norms is None else _HEAD_NORMS[norms.q.kind],
                neighbours=layer.pairing is Pairing.NEIGHBOURS,
                gated=gated,
            )  # fmt: skip
        return _Heads(qkv, norms, turn, rotation)

    def _entered(self, index: int, heads: _Heads, call: StepCall) -> Tensor:
        """Writes keys and values; returns rotated queries [T, num_q_heads, head_dim]."""
        layer, step = self.model.layers[index], call.step_of(index)
        assert isinstance(layer, Layer)
        backend, cache = call.backends[index], call.pool[index]
        if heads.rotation is not None:
            assert isinstance(backend, RotatingWriter)
            q = backend.write_rotated(cache, heads.qkv, heads.rotation, step)
            return _scaled(q, layer.position_scale, step)
        q, k, v = self.kernels.rotate(
            heads.qkv, *heads.turn.of(step), layer.num_q_heads, layer.num_kv_heads, heads.norms,
            layer.pairing,
        )  # fmt: skip
        backend.write(cache, k, v, step)
        return _scaled(q, layer.position_scale, step)

    def enter_latent(
        self,
        index: int,
        x: Tensor,
        layer: LatentLayer,
        products: Products,
        turns: Sequence[Turns],
        call: StepCall,
    ) -> Tensor:
        """Writes the latent rows of x [T, hidden_size].

        Returns rotated queries [T, num_q_heads, nope + R].
        """
        step = call.step_of(index)
        cos, sin = turns[layer.rotary].of(step)
        q, row = latent.enter(x, layer, cos, sin, self.kernels, products.plain)
        call.backends[index].write(call.pool[index], row[:, None], None, step)
        return _scaled(q, layer.position_scale, step)

    def attend(self, index: int, q: Tensor, call: StepCall, step: Step) -> Tensor:
        """Attends over the layer's stored rows: q [n, Hq, width] -> [n, columns of `output`]."""
        backend, cache, layer = call.backends[index], call.pool[index], self.model.layers[index]
        step = step.of(call.pool.group_of(index))
        if isinstance(layer, LatentLayer):
            return latent.attend(q, layer, backend, cache, step, self._per_head)
        assert isinstance(layer, Layer)
        return backend.attend(cache, q, step, layer.params).reshape(len(q), -1)


def _reader(part: Layer | LatentLayer | MixerLayer | Dense | Experts) -> Linear | None:
    """Returns the product that reads the normalised rows before this part.

    None unless it is their only reader.
    """
    if isinstance(part, Layer):
        return part.qkv
    return part.up if isinstance(part, Dense) else None


def gates_of(qkv: Tensor, layer: Layer) -> Tensor | None:
    """Returns a view of the gates [T, Hq, head_dim] in qkv [T, 2 (Hq + Hkv) * head_dim].

    None without gates.
    """
    return _with_gates(qkv, layer)[:, :, 1] if layer.gated else None


def without_gates(qkv: Tensor, layer: Layer) -> Tensor:
    """Copies q, k, v [T, (Hq + 2 Hkv) * head_dim] out of a gated layer's qkv [T, 2 (Hq + Hkv) * head_dim]."""
    q = _with_gates(qkv, layer)[:, :, 0]
    kv = qkv[:, 2 * layer.num_q_heads * layer.head_dim :].view(len(qkv), -1, layer.head_dim)
    return torch.cat([q, kv], 1).flatten(1)


def _with_gates(qkv: Tensor, layer: Layer) -> Tensor:
    """Returns queries and gates as a view [T, Hq, 2, head_dim]."""
    heads, dim = layer.num_q_heads, layer.head_dim
    return qkv[:, : 2 * heads * dim].view(-1, heads, 2, dim)


def _scaled(q: Tensor, scale: tuple[float, float] | None, step: Step) -> Tensor:
    """Returns queries [T, heads, head_dim] scaled by the logarithm of their positions; see `Layer`."""
    if scale is None:
        return q
    beta, length = scale
    factor = 1 + beta * torch.log(1 + torch.floor(step.positions / length))
    return q * factor[:, None, None].to(q.dtype)


@dataclass(frozen=True, slots=True)
class _Heads:
    """A layer's qkv [T, (Hq + 2 Hkv) * head_dim] before its norms and its rotation.

    rotation: what a backend that rotates is told; None if it cannot.
    """

    qkv: Tensor
    norms: QKNorms | None
    turn: Turns
    rotation: HeadRotation | None


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks among which a model is divided, and the number of tokens in its vocabulary."""

    group: Group
    vocab_size: int

    @staticmethod
    def of(group: Group | None, config: Any) -> Ranks | None:
        return None if group is None else Ranks(group, int(config.vocab_size))


@dataclass(frozen=True, slots=True)
class Turns:
    """Rotary angles. cos, sin: [.., R / 2], of every position if by_position, else of a step's tokens."""

    cos: Tensor
    sin: Tensor
    by_position: bool

    @staticmethod
    def none(like: Tensor) -> Turns:
        """Returns angles that rotate nothing (R = 0), with the dtype and device of like [..]."""
        return Turns(like.new_empty(1, 0), like.new_empty(1, 0), by_position=False)

    def of(self, step: Step) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [T, R / 2] of a step's tokens."""
        if not self.by_position:
            return self.cos, self.sin
        return self.cos[step.positions], self.sin[step.positions]


@dataclass(frozen=True, slots=True)
class AngleSource:
    """A transformers module of rotary embeddings, with the arguments that choose its angles."""

    rotary: Any
    arguments: tuple[Any, ...]
    layout: Angles

    @property
    def is_fixed(self) -> bool:
        kind = self.rotary.rope_type
        return (kind[self.arguments[0]] if isinstance(kind, dict) else kind) in _FIXED_ROPE

    @property
    def _has_sections(self) -> bool:
        """Whether the module takes positions in three sections; transformers 5.17 then requires all three."""
        said = getattr(self.rotary.config, "rope_parameters", None) or {}
        return hasattr(self.rotary, "mrope_section") or "mrope_section" in said

    def angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns transformers' cos and sin for positions [T], contiguous [T, R / 2] in x's dtype.

        X: [..].
        """
        at = positions[None]
        if self.layout is Angles.COMPLEX:
            turns = self.rotary(x[None], at, *self.arguments)[0]
            return turns.real.contiguous(), turns.imag.contiguous()
        if self._has_sections:
            at = at.expand(3, *at.shape)
        cos, sin = self.rotary(x[None], at, *self.arguments)
        # Positions of images have three sections, which are equal for text.
        cos, sin = (part[(0,) * (part.ndim - 2)] for part in (cos, sin))
        return self._once(cos), self._once(sin)

    def _once(self, table: Tensor) -> Tensor:
        if self.layout is Angles.ONCE:  # some versions of transformers return a transposed tensor
            return table.contiguous()
        if self.layout is Angles.NEIGHBOURS:
            return table[:, ::2].contiguous()
        return table[:, : table.shape[1] // 2].contiguous()


def frequencies(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns transformers' cos and sin for positions [T], without the repeated half: [T, head_dim / 2]."""
    return AngleSource(rotary, (), Angles.TWICE).angles(x, positions)


def kernels_for(weight: Tensor, *, batch_invariant: bool = False) -> Kernels:
    """Returns kernels for weight [..]: Triton's on a GPU, plain torch elsewhere and for float64."""
    if weight.device.type == "cuda" and weight.dtype is not torch.float64:
        from kvant.models.fused.triton_kernels import TritonKernels

        return TritonKernels(weight.device)
    return InvariantTorchKernels() if batch_invariant else TorchKernels()


def experts_for(weight: Tensor, tiled: TiledLinear | None = None) -> ExpertKernels:
    """Returns expert kernels for weight [..]: Triton's on a GPU, plain torch elsewhere and for float64.

    tiled: the batch-invariant product; with it no token's result depends on other tokens. None without.
    """
    if weight.device.type == "cuda" and weight.dtype is not torch.float64:
        from kvant.models.fused.triton_experts import TritonExperts

        return TritonExperts(weight.device, batch_invariant=tiled is not None)
    return TorchExperts() if tiled is None else TorchExperts(tiled, by_whole_vectors)
