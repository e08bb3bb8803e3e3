"""The same model under every format: what each would cost and hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvant.errors import ConfigError
from kvant.kv.dtype import KVDtype
from kvant.kv.memory import plan_memory
from kvant.kv.names import FormatRequest, known_names
from kvant.kv.request import Asked
from kvant.plan.planning import Plan, resolve_again


@dataclass(frozen=True, slots=True)
class Alternative:
    """One format as the global request, rules and skips kept. refused: why it cannot be, else None."""

    format: KVDtype
    bytes_per_token: int | None
    ratio_to_16bit: float | None
    capacity_tokens: int | None
    refused: str | None = None


def what_if(plan: Plan) -> tuple[Alternative, ...]:
    """Every format a user can name, in the order of the list, priced for this model."""
    nameable = [dtype for dtype in KVDtype if dtype.format.name in known_names()]
    return tuple(_alternative(plan, dtype) for dtype in nameable)


def _alternative(plan: Plan, dtype: KVDtype) -> Alternative:
    asked = Asked(FormatRequest(dtype, dtype), f"--kv-cache-dtype {dtype}")
    request = replace(plan.request.requests.target, explicit=(asked,))
    try:
        kv = resolve_again(plan, request)
    except ConfigError as refused:
        return Alternative(dtype, None, None, None, refused=refused.what)
    memory = plan_memory(
        plan.request.memory_bytes,
        plan.target.weights.bytes,
        kv,
        draft=None if plan.draft is None else plan.draft.kv,
        draft_weights_bytes=(plan.draft.weights.bytes or 0) if plan.draft else 0,
        workspace_bytes=plan.memory.workspace_bytes,
        utilization=plan.request.utilization,
        kv_cache_bytes=plan.request.kv_cache_bytes,
    )
    ratio = kv.bytes_per_token_16bit / kv.bytes_per_token if kv.bytes_per_token else None
    return Alternative(dtype, kv.bytes_per_token, ratio, memory.capacity_tokens)
