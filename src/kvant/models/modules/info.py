"""What planning knows about the forward through transformers' own modules. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.geometry.weight_recipe import read_recipe

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _has_experts(facts: ForwardFacts) -> bool:
    text = facts.config.get("text_config")
    sections = [facts.config, *([text] if isinstance(text, Mapping) else [])]
    return any(section.get(key) for section in sections for key in _EXPERTS)


def _refuse(facts: ForwardFacts) -> str | None:
    if facts.quantization is not None and facts.on_cpu:
        return "on a CPU, transformers' modules do not multiply with weights that Kvant rounds"
    if facts.quantization is not None and read_recipe(facts.config) is not None:
        return "the checkpoint's weights are quantised already"
    if facts.quantization is not None and _has_experts(facts):
        return "experts are not rounded yet"
    if facts.quantization is not None and facts.batch_invariant:
        return "with rounded weights its products depend on the number of rows"
    if facts.batch_invariant and facts.geometry.has_states:
        return "recurrences over prompts depend on where a prompt is cut"
    if facts.batch_invariant and not facts.on_cpu:
        return "on a GPU its products depend on the number of rows"
    return None


def _extra_bytes(facts: ForwardFacts) -> int:
    return 0 if facts.on_cpu else facts.scratch_bytes


INFO = ForwardInfo("transformers", "kvant.models.modules.forward", _refuse, _extra_bytes)
