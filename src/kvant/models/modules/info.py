"""What planning knows about the forward through transformers' own modules. No torch."""

from __future__ import annotations

from kvant.models.forward_info import ForwardFacts, ForwardInfo


def _refuse(facts: ForwardFacts) -> str | None:
    if facts.quantization is not None:
        return "transformers' modules do not multiply with weights that Kvant rounds"
    if facts.batch_invariant and not facts.on_cpu:
        return "on a GPU its products depend on the number of rows"
    return None


INFO = ForwardInfo("transformers", "kvant.models.modules.forward", _refuse)
