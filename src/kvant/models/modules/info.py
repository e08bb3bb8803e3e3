"""Facts for planning about the forward through transformers' own modules. No torch."""

from __future__ import annotations

from kvant.kv.geometry import Attention
from kvant.models.forward_info import ForwardFacts, ForwardInfo


def _refuse(facts: ForwardFacts) -> str | None:
    if any(layer.attention is Attention.MLA for layer in facts.geometry.layers):
        return "transformers' modules expand latents before attention, and pages hold latents"
    if facts.refuse_rounding is not None:
        return facts.refuse_rounding
    if facts.has_narrow and facts.batch_invariant:
        return "with narrow weights its products depend on the number of rows"
    if facts.batch_invariant and not facts.on_cpu:
        return "on a GPU its products depend on the number of rows"
    return None


def _extra_bytes(facts: ForwardFacts) -> int:
    return 0 if facts.on_cpu else facts.scratch_bytes


INFO = ForwardInfo("transformers", "kvant.models.modules.forward", _refuse, _extra_bytes)
