"""Reads a loaded transformers module by its family's recipe.

The module's parameters become views of the joined weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvant.attention.base import AttentionParams
from kvant.errors import EngineFault
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.spec import KVPlan
from kvant.models.fused.experts import Clamp, Experts, GateOrder, Shared
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.join import check_numbers, join, turn
from kvant.models.fused.layers import LatentLayer, Layer, MixerLayer, Model, Norm, QKNorms
from kvant.models.fused.linear import Apart, Linear, Multiply
from kvant.models.fused.narrow_experts import NarrowExperts
from kvant.models.fused.recipe import (
    Activation,
    FeedForward,
    Mixture,
    NormKind,
    Pairing,
    Recipe,
    Rotated,
    RouterKind,
    activation_of,
)
from kvant.models.fused.routing import Routing, Scoring
from kvant.models.geometry.parameters import QKNorm
from kvant.models.recurrent.hook import mixer_of
from kvant.weights.codecs import NarrowStack, decode
from kvant.weights.linear import NarrowEmbedding, NarrowLinear

_SCORING = {
    RouterKind.SOFTMAX_TOP_K: Scoring.SOFTMAX_THEN_TOP_K,
    RouterKind.TOP_K_SOFTMAX: Scoring.TOP_K_THEN_SOFTMAX,
    RouterKind.SIGMOID: Scoring.SIGMOID,
}


def decoder_of(module: PreTrainedModel) -> Any:
    """Returns the part of a transformers model that has the decoder's layers."""
    return module.get_decoder()  # type: ignore[no-untyped-call]


def read_model(
    module: PreTrainedModel, recipe: Recipe, plan: KVPlan, multiply: Multiply
) -> tuple[Model, tuple[Any, ...]]:
    """Returns the model, and for each kind of rotary angles the arguments of the module's rotary embedding.

    multiply: the product for unquantised weights. Raises EngineFault if the recipe does not describe the
    module.
    """
    decoder = decoder_of(module)
    if type(decoder).__name__ != recipe.module_class:
        raise EngineFault(
            f"the plan runs {type(decoder).__name__} through Kvant's own decoder, which reads "
            f"{recipe.module_class}"
        )
    config = module.config.get_text_config(decoder=True)
    reader = _Reader(recipe, config, multiply)
    layers = tuple(
        reader.layer(index, layer, plan.layers[index].geometry)
        for index, layer in enumerate(decoder.layers)
    )
    head: Any = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    table = _at(decoder, recipe.embedding)
    scale = 1.0
    if recipe.embed_scale is not None:
        found: Any = _at(decoder, recipe.embed_scale)
        # transformers rounds a tensor to the embedding's dtype before it multiplies.
        scale = float(found.to(table.weight.dtype) if isinstance(found, Tensor) else found)
    made = Model(
        layers=layers,
        embedding=table.weight,
        embed_scale=scale,
        norm=reader.norm(_at(decoder, recipe.last_norm), recipe.norm),
        head=join([head], multiply, type(module).__name__),
        parallel=_flag(recipe.block.parallel, config),
        logits_scale=_logits_scale(recipe, config),
        logits_cap=float(_config(config, recipe.logits_cap) or 0.0),
        table=table.narrow if isinstance(table, NarrowEmbedding) else None,
    )
    return made, reader.angles


def read_feed_forward(
    module: Any, recipe: Recipe, config: Any, multiply: Multiply, name: str = "a layer"
) -> Dense | Experts:
    """Reads a feed-forward module by its family's recipe. name: of the layer, for errors."""
    return _Reader(recipe, config, multiply).feed_forward(module, module, name)


def _logits_scale(recipe: Recipe, config: Any) -> float:
    divisor, factor = _config(config, recipe.logits_divided), _config(config, recipe.logits_times)
    return float(factor if factor is not None else 1.0) / float(
        divisor if divisor is not None else 1.0
    )


def _flag(said: bool | str, config: Any) -> bool:
    return bool(getattr(config, said)) if isinstance(said, str) else said


def _config(config: Any, field: str | None) -> Any:
    return None if field is None else getattr(config, field, None)


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


class _Reader:
    """Reads one module. angles: arguments of the rotary embedding, indexed by `Layer.rotary`."""

    def __init__(self, recipe: Recipe, config: Any, multiply: Multiply) -> None:
        self._recipe, self._config, self._multiply = recipe, config, multiply
        self.angles: tuple[Any, ...] = ()

    def layer(
        self, index: int, layer: Any, geometry: LayerGeometry
    ) -> Layer | LatentLayer | MixerLayer:
        recipe = self._recipe
        attend = recipe.attention
        mixer = mixer_of(layer) if recipe.mixers else None
        if mixer is not None:
            name = f"{type(layer).__name__} (layer {index})"
            return MixerLayer(**self._frame(layer, name), mixer=mixer)
        attention = getattr(layer, attend.module)
        name = f"{type(attention).__name__} (layer {index})"
        self._check(attention, geometry, name)
        frame = self._frame(layer, name)
        if geometry.attention is Attention.MLA:
            return self._latent(index, attention, geometry, frame, name)
        clip = _config(self._config, attend.clip)
        return Layer(
            **frame,
            qkv=join([getattr(attention, p) for p in attend.projections], self._multiply, name),
            output=join([getattr(attention, attend.output)], self._multiply, name),
            num_q_heads=geometry.num_q_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim_k,
            qk_norms=self._qk_norms(attention),
            rotary=self._rotary(index, attention, geometry),
            pairing=self._pairing(),
            clip=None if clip is None else float(clip),
            by_head=attend.by_head,
            position_scale=self._position_scale(),
            params=AttentionParams(
                scale=float(attention.scaling),
                window=geometry.window,
                softcap=geometry.softcap,
                sinks=attention.sinks if geometry.sinks else None,
            ),
            gated=attend.gated,
        )

    def _latent(
        self,
        index: int,
        attention: Any,
        geometry: LayerGeometry,
        frame: Mapping[str, Any],
        name: str,
    ) -> LatentLayer:
        """Reads an attention module with latents. frame: the fields that `_frame` returns."""
        recipe, attend = self._recipe, self._recipe.attention
        q_norm, q_up = None, None
        first = getattr(attention, "q_proj", None)
        if first is None:
            first = attention.q_a_proj
            q_norm = self.norm(attention.q_a_layernorm, recipe.norm)
            q_up = join([attention.q_b_proj], self._multiply, name)
        heads, rank = geometry.num_q_heads, geometry.head_dim_v
        expand = _numbers(attention.kv_b_proj, attention.kv_a_layernorm.weight.dtype, name)
        expand = expand.view(heads, -1, expand.shape[1])
        rotary = self._rotary(index, attention, geometry)
        if rotary is None or expand.shape[2] != rank:
            raise EngineFault(f"{name} keeps latents of another shape than the plan says")
        return LatentLayer(
            **frame,
            entry=self._beside(first, attention.kv_a_proj_with_mqa, name),
            q_norm=q_norm,
            q_up=q_up,
            kv_norm=self.norm(attention.kv_a_layernorm, recipe.norm),
            expanding=expand,
            nope=int(attention.qk_nope_head_dim),
            output=join([getattr(attention, attend.output)], self._multiply, name),
            num_q_heads=heads,
            rotary_width=geometry.head_dim_k - rank,
            rotary=rotary,
            pairing=self._pairing(),
            position_scale=self._position_scale(),
            params=AttentionParams(scale=float(attention.scaling)),
        )

    def _frame(self, layer: Any, name: str) -> Mapping[str, Any]:
        """Returns the fields of `Frame` by name."""
        recipe, block = self._recipe, self._recipe.block
        factor = 1.0
        if block.residual_multiplier is not None:
            factor = float(getattr(layer, block.residual_multiplier))
        module = getattr(layer, recipe.feed_forward.module)
        if module is None:
            assert recipe.mixture is not None
            names = recipe.mixture.shared_names or recipe.feed_forward
            feed_forward: Dense | Experts = self._dense(
                getattr(layer, str(recipe.mixture.shared)), names, name
            )
        else:
            feed_forward = self.feed_forward(module, layer, name)
        return {
            "attn_in": self._optional(layer, block.attn_in),
            "attn_out": self._optional(layer, block.attn_out),
            "ffn_in": self._optional(layer, block.ffn_in),
            "ffn_out": self._optional(layer, block.ffn_out),
            "feed_forward": feed_forward,
            "factor": factor,
        }

    def _beside(self, first: Any, second: Any, name: str) -> Linear:
        """Joins two products; returns two separate ones if only one of them has a bias."""
        if (first.bias is None) == (second.bias is None):
            return join([first, second], self._multiply, name)
        return Apart(tuple(join([one], self._multiply, name) for one in (first, second)))

    def _pairing(self) -> Pairing:
        attend = self._recipe.attention
        if attend.interleaved is None:
            return attend.pairing
        return Pairing.NEIGHBOURS if _flag(attend.interleaved, self._config) else Pairing.HALVES

    def _check(self, attention: Any, geometry: LayerGeometry, name: str) -> None:
        """Raises EngineFault if the module's layer differs from the plan's."""
        window = getattr(attention, "sliding_window", geometry.window)
        if not getattr(attention, "is_sliding", True):
            window = None
        if window != geometry.window or not geometry.causal:
            raise EngineFault(f"{name} has the window {window}, the plan says {geometry.window}")
        is_latent = geometry.attention is Attention.MLA
        if is_latent is not self._recipe.attention.latent:
            raise EngineFault(f"{name} and the plan differ in whether a token's latent is stored")
        if geometry.shared_with is not None or (
            not is_latent and geometry.head_dim_k != geometry.head_dim_v
        ):
            raise EngineFault(f"{name} has no keys and values of its own, or of two sizes")

    def norm(self, module: Any, kind: NormKind) -> Norm:
        """Reads a norm module of any family; the attribute of eps has different names."""
        names = ("variance_epsilon", "eps", "epsilon")
        eps = next((getattr(module, name) for name in names if hasattr(module, name)), 1e-5)
        return Norm(
            kind, getattr(module, "weight", None), getattr(module, "bias", None), float(eps)
        )

    def _optional(self, layer: Any, name: str | None) -> Norm | None:
        module = None if name is None else _at(layer, name)
        if module is None or isinstance(module, nn.Identity):
            return None
        return self.norm(module, self._recipe.norm)

    def _position_scale(self) -> tuple[float, float] | None:
        if not self._recipe.attention.position_scale:
            return None
        rope = self._config.rope_parameters
        beta = rope.get("llama_4_scaling_beta")
        return None if beta is None else (beta, rope["original_max_position_embeddings"])

    def _qk_norms(self, attention: Any) -> QKNorms | None:
        attend = self._recipe.attention
        if attend.qk_norm is QKNorm.NONE or getattr(attention, attend.q_norm, None) is None:
            return None
        kind = attend.qk_kind or self._recipe.norm
        q, k = (self.norm(getattr(attention, n), kind) for n in (attend.q_norm, attend.k_norm))
        return QKNorms(q, k, whole=attend.qk_norm is QKNorm.ROW, after=attend.norm_after)

    def _rotary(self, index: int, attention: Any, geometry: LayerGeometry) -> int | None:
        rotated = self._recipe.attention.rotated
        has_windows = getattr(self._config, "sliding_window", None) is not None
        windowed = rotated is Rotated.WINDOWED or (
            rotated is Rotated.WINDOWED_IF_ANY and has_windows
        )
        if windowed and geometry.window is None:
            return None
        if rotated is Rotated.FLAGGED and not attention.use_rope:
            return None
        if rotated is Rotated.NAMED and self._config.position_embedding_type != "rope":
            return None
        arguments = (self._config.layer_types[index],) if self._recipe.by_layer_type else ()
        if arguments not in self.angles:
            self.angles = (*self.angles, arguments)
        return self.angles.index(arguments)

    def feed_forward(self, module: Any, layer: Any, name: str) -> Dense | Experts:
        mixture = self._recipe.mixture
        if mixture is not None and hasattr(module, mixture.experts):
            return self._experts(module, layer, mixture, name)
        return self._dense(module, self._recipe.feed_forward, name)

    def _dense(self, module: Any, names: FeedForward, name: str) -> Dense:
        return Dense(
            up=join([getattr(module, part) for part in names.up], self._multiply, name),
            down=join([getattr(module, names.down)], self._multiply, name),
            activation=self._activation(names, module),
            gated=names.gated,
        )

    def _activation(
        self, names: FeedForward, module: Any
    ) -> Activation | Callable[[Tensor], Tensor]:
        if names.own is not None:
            own: Callable[[Tensor], Tensor] = getattr(module, names.own)
            return own
        said = getattr(self._config, names.field, None)
        found = names.activation if said is None else activation_of(said)
        if found is None:
            raise EngineFault(f"Kvant's own decoder does not compute {said}; the plan says it does")
        return found

    def _experts(self, module: Any, layer: Any, mixture: Mixture, name: str) -> Experts:
        router, experts = _at(module, mixture.router), getattr(module, mixture.experts)
        gate_up: Tensor | NarrowStack
        down: Tensor | NarrowStack
        if isinstance(experts, NarrowExperts):
            gate_up, down = experts.gate_up, experts.down
        else:
            weights = experts.gate_up_proj, experts.down_proj
            if any(type(weight) is not nn.Parameter or weight.ndim != 3 for weight in weights):
                raise EngineFault(
                    f"{name} has experts in a layout that Kvant's own decoder does not read"
                )
            gate_up, down = (turn(w) if mixture.transposed else w for w in weights)
        shared = None
        if mixture.shared is not None and _has(module, layer, mixture.shared):
            beside = _find(module, layer, mixture.shared)
            gate = None
            if mixture.shared_gate is not None:
                gate = join([getattr(module, mixture.shared_gate)], self._multiply, name)
            names = mixture.shared_names or self._recipe.feed_forward
            shared = Shared(self._dense(beside, names, name), gate)
        clamp = None
        if mixture.clamped:
            clamp = Clamp(float(experts.limit), float(experts.alpha))
        correction: Tensor | None = None
        if mixture.bias is not None:
            correction = _find(router, module, mixture.bias).detach().reshape(-1)
        return Experts(
            self._routing(module, router, gate_up.shape[0], mixture),
            (router.weight, getattr(router, "bias", None)),
            (gate_up, getattr(experts, "gate_up_proj_bias", None)),
            (down, getattr(experts, "down_proj_bias", None)),
            order=GateOrder.ALTERNATING if mixture.alternating else GateOrder.HALVES,
            clamp=clamp,
            shared=shared,
            correction=correction,
            rounds=isinstance(experts, NarrowExperts) and experts.rounds,
        )

    def _routing(self, module: Any, router: Any, count: int, mixture: Mixture) -> Routing:
        renormalise = mixture.renormalise
        if isinstance(renormalise, str):
            renormalise = bool(_find(router, module, renormalise))
        scale, groups = mixture.scale, mixture.groups
        found = 1.0 if scale is None else float(_find(router, module, scale))
        if (
            mixture.grouped is not None
            and getattr(router, mixture.grouped[0]) != mixture.grouped[1]
        ):
            groups = None
        counts = (1, 1) if groups is None else tuple(int(getattr(router, g)) for g in groups)
        top_k = next(
            p.top_k for p in (router, _parent(router, module), module) if hasattr(p, "top_k")
        )
        return Routing(
            count, int(top_k), _SCORING[mixture.kind],
            renormalise=renormalise, rounded=mixture.rounded, wide=mixture.wide, scale=found,
            groups=counts[0], top_groups=counts[1], counted=1 if mixture.by_best else 2,
        )  # fmt: skip


def _numbers(product: Any, dtype: torch.dtype, name: str) -> Tensor:
    """Returns a layer's weight [out, in], decoded to dtype if it is narrow, to be cut into heads."""
    if isinstance(product, NarrowLinear):
        return decode(product.narrow, dtype)
    check_numbers([product], name)
    weight: Tensor = product.weight
    return weight.detach()


def _parent(router: Any, module: Any) -> Any:
    """Returns the module that holds the router, which may be inside the block's router."""
    return next((part for part in module.children() if router in part.children()), module)


def _has(first: Any, second: Any, path: str) -> bool:
    try:
        return _find(first, second, path) is not None
    except AttributeError:
        return False


def _find(first: Any, second: Any, path: str) -> Any:
    """Returns the attribute of the first module, or else of the second."""
    try:
        return _at(first, path)
    except AttributeError:
        return _at(second, path)
