"""The warning about values beyond a layer's range."""

from __future__ import annotations

from collections.abc import Sequence

from kvant.kv.saturation import Saturated
from kvant.kv.spec import Choice


def saturation_warning(found: Sequence[Saturated]) -> str:
    """Return one line for layers that were not reported before."""
    shown = ", ".join(_layer(one) for one in found[:4])
    more = f" and {len(found) - 4} more layers" if len(found) > 4 else ""
    return (
        f"values were beyond what the KV cache holds and were stored as its largest: {shown}{more}; "
        "answers may suffer. Ways out: --kv-cache-dtype fp8_per_token_head, bfloat16 for these layers "
        "(--kv-cache-rule), or a checkpoint with calibrated scales"
    )


def _layer(one: Saturated) -> str:
    sides = ((one.k, one.spec.k, "K"), (one.v, one.spec.v, "V"))
    parts = [_side(count, choice, name) for count, choice, name in sides if count]
    return f"layer {one.layer} ({', '.join(parts)})"


def _side(count: int, choice: Choice | None, name: str) -> str:
    assert choice is not None
    return f"{count} of {name} in {choice.dtype}"
