"""Facts for planning about the forward with its own products for few tokens. No torch."""

from __future__ import annotations

from kvant.attention.need import DeviceKind
from kvant.kv.dtype import ComputeDtype
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.fused.info import extra_bytes, find_recipe, refuse_layers

MOST_TOKENS = 64
"""Maximum number of tokens of a step for its own products; larger steps run in the fused forward.
Also the width of a row of sums of squares in the kernels."""

ROWS, MOST_SPLIT = 64, 4
"""Rows in a stripe of a weight, and the maximum number of parts into which a stripe's columns are cut."""

_MULTIPROCESSORS = 256
"""An upper bound of the multiprocessors of today's GPUs."""


def _refuse(facts: ForwardFacts) -> str | None:
    if facts.device.kind is not DeviceKind.CUDA:
        return "its kernels run on NVIDIA GPUs"
    if facts.compute is not ComputeDtype.BFLOAT16:
        return f"it computes in bfloat16, not in {facts.compute.value}"
    if facts.refuse_rounding is not None:
        return facts.refuse_rounding
    if facts.batch_invariant:
        return "its sums depend on the number of rows, and --batch-invariant was asked for"
    recipe = find_recipe(facts)
    if recipe is not None and recipe.attention.latent:
        return "its layers keep latents, which the fused forward alone attends to"
    return refuse_layers(facts)


def _extra_bytes(facts: ForwardFacts) -> int:
    return extra_bytes(facts) + 4 * _MULTIPROCESSORS * MOST_SPLIT * ROWS * MOST_TOKENS


INFO = ForwardInfo("few rows", "kvant.models.fused.few_rows_decoder", _refuse, _extra_bytes)
