"""What planning knows about the compiled forward on a CPU. Needs neither torch nor numba."""

from __future__ import annotations

from kvant.attention.cpu.info import refuse_host
from kvant.kv.dtype import ComputeDtype
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.fused.info import (
    find_recipe,
    has_experts,
    products,
    refuse_layers,
)
from kvant.models.fused.recipe import Activation, activation_of
from kvant.models.geometry.fields import text_section
from kvant.models.geometry.parameters import QKNorm
from kvant.models.geometry.weight_recipe import read_recipe

GROUP = 32
"""Columns that a product's kernel takes at a time; 4-bit weights share a scale over as many."""

TILE = 16
"""Outputs of a narrow weight that a product's kernel takes at a time; the last are padded."""

FEWEST_ROWS = 4
"""Rows of a weight that a product's kernel takes at a time, at most."""

NORM_STEP = 16
"""Numbers of a head that the norm of queries and keys takes at a time."""


def refuse_shape(rows: int, columns: int) -> str | None:
    """Return why there is no kernel for a weight of this shape, or None."""
    if columns % GROUP or not columns:
        return f"a weight's {columns} inputs are no multiple of {GROUP}"
    if rows < FEWEST_ROWS:
        return f"a weight's {rows} outputs are fewer than {FEWEST_ROWS}"
    return None


def _refuse(facts: ForwardFacts) -> str | None:
    if not facts.on_cpu:
        return "its kernels run on CPUs"
    if facts.num_ranks > 1:
        return "a step is one call, in which ranks do not meet"
    if facts.compute is not ComputeDtype.FLOAT32:
        return f"it computes in float32, not in {facts.compute.value}"
    if facts.quantization is not None and read_recipe(facts.config) is not None:
        return "the checkpoint's weights are quantised already"
    if has_experts(facts):
        return "it runs dense layers, and this model has experts"
    recipe = find_recipe(facts)
    if recipe is not None and not recipe.is_plain:
        return f"its layers are Llama's, which those of {facts.geometry.model_type} are not"
    activation = text_section(facts.config).get("hidden_act", "silu")
    if activation_of(activation) is not Activation.SILU:
        return f"it computes silu, not {activation}"
    return refuse_layers(facts) or refuse_host(facts.device) or _refuse_shapes(facts)


def _refuse_shapes(facts: ForwardFacts) -> str | None:
    head_dim = facts.geometry.layers[0].head_dim_k
    recipe = find_recipe(facts)
    normed = recipe is not None and recipe.attention.qk_norm is not QKNorm.NONE
    if normed and head_dim % NORM_STEP:
        return f"heads of {head_dim} are normed in steps of {NORM_STEP}"
    reasons = (refuse_shape(*shape) for shape in products(facts))
    return next((reason for reason in reasons if reason is not None), None)


INFO = ForwardInfo("compiled", "kvant.models.cpu.decoder", _refuse, rounds_itself=True)
