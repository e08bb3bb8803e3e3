"""Facts for planning about Kvant's own decoder. No torch."""

from __future__ import annotations

from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import Attention
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.fused.recipe import Recipe, activation_of
from kvant.models.fused.recipes import recipe_of
from kvant.models.geometry.fields import Fields, text_section
from kvant.models.geometry.parameters import QKNorm
from kvant.models.weights import ELEMENT_BYTES

MOST_ANGLES = 1 << 18
"""Maximum number of positions whose rotary angles are kept: 64 MiB for heads of 128."""

_DEFAULT_INNER = 11008  # LlamaConfig's; the other classes' defaults are multiples of 32 too


def find_recipe(facts: ForwardFacts) -> Recipe | None:
    """Returns the recipe of the model's family; None for a family without one."""
    config = text_section(facts.config)
    return recipe_of(str(config.get("model_type", facts.geometry.model_type)))


def refuse_layers(facts: ForwardFacts) -> str | None:
    """Returns why the decoder cannot compute this model's layers; None if it can."""
    recipe, config = find_recipe(facts), text_section(facts.config)
    if recipe is None:
        return f"Kvant's own decoder has no recipe for {facts.geometry.model_type}"
    if facts.num_ranks > 1 and recipe.attention.qk_norm is QKNorm.ROW:
        return "its norms span the heads of all ranks"
    if facts.geometry.has_states and not recipe.mixers:
        return "its layers keep states, of which Kvant's own decoder has no mixer"
    if facts.geometry.has_states and facts.batch_invariant:
        reason = _refuse_invariant_states(facts)
        if reason is not None:
            return reason
    for field, values in recipe.only.items():
        if config.get(field) not in values:
            return f"Kvant's own decoder does not compute {field} {config.get(field)!r}"
    activation = config.get(recipe.feed_forward.field)
    own = recipe.feed_forward.own is not None
    if not own and activation is not None and activation_of(activation) is None:
        return f"Kvant's own decoder does not compute {activation}"
    factors = recipe.logits_divided, recipe.logits_times
    ends = any(field and config.get(field) != 1 for field in factors)
    if config is not facts.config and (ends or config.get(recipe.logits_cap or "")):
        return "a multimodal model may finish its logits otherwise than its decoder's family"
    layers = facts.geometry.layers
    if any(layer.shared_with is not None for layer in layers):
        return "layers read keys and values of others"
    latent = recipe.attention.latent
    if any((layer.attention is Attention.MLA) is not latent for layer in layers):
        return "its recipe and its geometry differ in whether a token's latent is stored"
    if not latent and any(layer.head_dim_k != layer.head_dim_v for layer in layers):
        return "keys and values differ in size"
    if facts.kept_codes is not None:
        return f"the weights stay quantised by {facts.kept_codes}"
    is_silu = activation is None or activation_of(activation) is activation_of("silu")
    if has_experts(facts) and not is_silu:
        return f"experts compute silu, not {activation}"
    return None


def _refuse_invariant_states(facts: ForwardFacts) -> str | None:
    """Returns why recurrent layers cannot be batch-invariant here; None if they can.

    Only kernels that run token after token, and round each state as it is stored, are batch-invariant.
    """
    if facts.on_cpu:
        return "its recurrences on a CPU depend on where a prompt is cut"
    if facts.compute is ComputeDtype.FLOAT64:
        return "no kernel passes over the tokens of a recurrence in float64"
    shapes = [state.shape for layer in facts.geometry.layers for state in layer.states]
    if any(shape[-1] % 2 for shape in shapes):
        return "rows of its states do not fill words of 16 bits"
    return None


def has_experts(facts: ForwardFacts) -> bool:
    """Whether the model has layers of experts."""
    recipe = find_recipe(facts)
    return recipe is not None and recipe.mixture is not None


def products(facts: ForwardFacts) -> list[tuple[int, int]]:
    """Returns rows and columns of the decoder's matrices: joined ones of its first layer, and the head.

    Experts are left out.
    """
    geometry = facts.geometry
    hidden, layer = geometry.hidden_size, geometry.layers[0]
    heads, dim = layer.num_q_heads, layer.head_dim_k
    text = Fields(text_section(facts.config))
    inner = text.optional_integer("intermediate_size") or _DEFAULT_INNER
    return [
        ((heads + 2 * layer.num_kv_heads) * dim, hidden),
        (hidden, heads * dim),
        (2 * inner, hidden),
        (hidden, inner),
        (geometry.vocab_size, hidden),
    ]


def table_bytes(facts: ForwardFacts) -> int:
    """Returns the bytes of the rotary angles that a GPU keeps for all positions."""
    recipe = find_recipe(facts)
    if facts.on_cpu or recipe is None:
        return 0
    most = min(facts.geometry.max_model_len or MOST_ANGLES, MOST_ANGLES)
    kinds = 1
    if recipe.by_layer_type:
        kinds = len({layer.window is None for layer in facts.geometry.layers})
    dim = max(
        layer.head_dim_k - (layer.head_dim_v if recipe.attention.latent else 0)
        for layer in facts.geometry.layers
    )
    return kinds * most * dim * ELEMENT_BYTES[facts.compute]


def _refuse(facts: ForwardFacts) -> str | None:
    if facts.refuse_rounding is not None:
        return facts.refuse_rounding
    return refuse_layers(facts)


def extra_bytes(facts: ForwardFacts) -> int:
    """Returns the bytes of the kept angles, plus room to decode the largest narrow weight."""
    return table_bytes(facts) + (0 if facts.on_cpu else facts.scratch_bytes)


INFO = ForwardInfo("fused", "kvant.models.fused.decoder", _refuse, extra_bytes)
