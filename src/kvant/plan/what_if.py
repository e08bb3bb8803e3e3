"""The same model in every format: its cost and its capacity."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvant.errors import ConfigError
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest, known_names
from kvant.kv.request import Asked
from kvant.plan.plan import Plan
from kvant.plan.resolution import resolve_again


@dataclass(frozen=True, slots=True)
class Alternative:
    """One format as the global request; rules and skips stay. refused: why it is impossible, else None."""

    format: KVDtype
    bytes_per_token: int | None
    ratio_to_16bit: float | None
    capacity_tokens: int | None
    refused: str | None = None


def what_if(plan: Plan) -> tuple[Alternative, ...]:
    """Every format that a user can name, in the order of `KVDtype`, applied to this model."""
    nameable = [dtype for dtype in KVDtype if dtype.format.name in known_names()]
    return tuple(_alternative(plan, dtype) for dtype in nameable)


def _alternative(plan: Plan, dtype: KVDtype) -> Alternative:
    asked = Asked(FormatRequest(dtype, dtype), f"--kv-cache-dtype {dtype}")
    request = replace(plan.request.requests.target, explicit=(asked,))
    try:
        kv = resolve_again(plan, request)
    except ConfigError as refused:
        return Alternative(dtype, None, None, None, refused=refused.what)
    capacity = plan.memory_with(kv).capacity_tokens
    ratio = kv.bytes_per_token_16bit / kv.bytes_per_token if kv.bytes_per_token else None
    return Alternative(dtype, kv.bytes_per_token, ratio, capacity)
