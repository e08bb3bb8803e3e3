"""Facts for planning about the compiled forward on a CPU. Needs neither torch nor numba."""

from __future__ import annotations

from kvant.attention.cpu.info import refuse_host
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import StateKind
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.fused.info import (
    find_recipe,
    has_experts,
    products,
    refuse_layers,
)
from kvant.models.fused.recipe import (
    Activation,
    Mixture,
    Recipe,
    RouterKind,
    activation_of,
)
from kvant.models.geometry.fields import text_section
from kvant.models.geometry.parameters import QKNorm
from kvant.models.geometry.weight_recipe import read_recipe

GROUP = 32
"""Columns that a product's kernel processes at a time. In 4-bit weights they share a scale."""

TILE = 16
"""Outputs of a narrow weight that a product's kernel computes at a time. The last tile is padded."""

FEWEST_ROWS = 4
"""The fewest outputs of a weight. A product's kernel processes up to this many at a time."""

NORM_STEP = 16
"""Elements of a head that the norm of queries and keys processes at a time."""


def refuse_shape(rows: int, columns: int) -> str | None:
    """Returns why there is no kernel for a weight of this shape, or None."""
    if columns % GROUP or not columns:
        return f"a weight's {columns} inputs are no multiple of {GROUP}"
    if rows < FEWEST_ROWS:
        return f"a weight's {rows} outputs are fewer than {FEWEST_ROWS}"
    return None


MOST_TAPS = 8
"""Inputs of a convolution before a recurrence, at most."""

_RECURRENT = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Families whose recurrent layers are the gated delta nets that compiled code runs."""

_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts")
"""Fields for the inner sizes of networks, and for the number of experts, of which a router has a row each."""

_ROUTERS = frozenset({RouterKind.SOFTMAX_TOP_K, RouterKind.TOP_K_SOFTMAX})


def _refuse(facts: ForwardFacts) -> str | None:
    if not facts.on_cpu:
        return "its kernels run on CPUs"
    if facts.num_ranks > 1:
        return "a step is one call, in which ranks do not meet"
    if facts.compute not in (ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16):
        return f"it computes in float32 or bfloat16, not in {facts.compute.value}"
    if facts.quantization is not None and facts.compute is not ComputeDtype.FLOAT32:
        return f"it multiplies rounded weights in float32, not in {facts.compute.value}"
    if facts.quantization is not None and read_recipe(facts.config) is not None:
        return "the checkpoint's weights are quantised already"
    recipe = find_recipe(facts)
    if recipe is not None:
        why = _refuse_recipe(facts, recipe)
        if why is not None:
            return why
    activation = text_section(facts.config).get("hidden_act", "silu")
    if activation_of(activation) is not Activation.SILU:
        return f"it computes silu, not {activation}"
    return refuse_layers(facts) or refuse_host(facts.device) or _refuse_shapes(facts)


def _refuse_recipe(facts: ForwardFacts, recipe: Recipe) -> str | None:
    name = facts.geometry.model_type
    if recipe.mixture is not None:
        if not _serves_experts(recipe.mixture):
            return f"it does not compute layers of experts as those of {name} are"
        if facts.has_narrow:
            return "it runs experts with weights of 16 or 32 bits only"
    if recipe.mixers:
        family = text_section(facts.config).get("model_type", name)
        if family not in _RECURRENT:
            return f"its recurrent layers are gated delta nets, which those of {name} are not"
        if facts.has_narrow:
            return "it runs recurrent layers with weights of 16 or 32 bits only"
        if facts.batch_invariant:
            return "its recurrences run in other ways over prompts than over single tokens"
    return None if recipe.is_plain else f"its layers are Llama's, which those of {name} are not"


def _serves_experts(mixture: Mixture) -> bool:
    return (
        mixture.kind in _ROUTERS
        and not mixture.wide
        and mixture.scale is None
        and mixture.groups is None
        and mixture.bias is None
        and not mixture.transposed
        and not mixture.alternating
        and not mixture.clamped
    )


def _refuse_shapes(facts: ForwardFacts) -> str | None:
    recipe, geometry, config = find_recipe(facts), facts.geometry, text_section(facts.config)
    attending = [layer for layer in geometry.layers if layer.num_q_heads]
    if not attending:
        return "it runs models of which some layers attend"
    layer = attending[0]
    normed = recipe is not None and (
        recipe.attention.qk_norm is not QKNorm.NONE or recipe.attention.gated
    )
    if normed and layer.head_dim_k % NORM_STEP:
        return f"heads of {layer.head_dim_k} are normed in steps of {NORM_STEP}"
    hidden = geometry.hidden_size
    shapes = [(geometry.vocab_size, hidden), (hidden, layer.num_q_heads * layer.head_dim_k)]
    if has_experts(facts):
        shapes += [(hidden, config[field]) for field in _WIDTHS if config.get(field) is not None]
        shapes += [(config[field], hidden) for field in _EXPERTS if config.get(field) is not None]
    else:
        shapes += products(facts)[2:4]
    for state in {state for one in geometry.layers for state in one.states}:
        if state.kind is StateKind.CONV:
            if not 2 <= state.shape[0] + 1 <= MOST_TAPS:
                return (
                    f"a convolution of {state.shape[0] + 1} inputs is not one of 2 to {MOST_TAPS}"
                )
            continue
        heads, values, keys = state.shape
        if values % NORM_STEP or keys % NORM_STEP:
            return f"recurrent heads of {values} x {keys} are taken in steps of {NORM_STEP}"
        shapes.append((hidden, heads * values))
    reasons = (refuse_shape(*shape) for shape in shapes)
    return next((reason for reason in reasons if reason is not None), None)


INFO = ForwardInfo("compiled", "kvant.models.cpu.decoder", _refuse, rounds_itself=True)
