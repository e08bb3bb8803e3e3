"""Resolving the KV cache of one planned model, as requested and in every other format."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvant.attention.need import BackendInfo, Need
from kvant.attention.reference.info import INFO as REFERENCE
from kvant.attention.select import allow, device_encodings, select
from kvant.errors import ConfigError, WayOut
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import LayerGeometry, ModelGeometry
from kvant.kv.names import FormatRequest, known_names
from kvant.kv.request import Asked, KVRequest
from kvant.kv.resolve import Served, Surroundings, resolve
from kvant.kv.spec import KVPlan, Role
from kvant.models.geometry.compute_dtype import resolve_compute_dtype
from kvant.models.sharding.shard import rank_layer
from kvant.plan.plan import DEFAULT_PAGE_SIZE, Plan, PlanRequest


def resolve_again(plan: Plan, asked: KVRequest) -> KVPlan:
    """The target's KV plan under another request, from the facts of `plan`."""
    target = plan.target
    return resolve_kv(
        plan.request, asked, target.checkpoint, target.local.name, target.geometry, Role.TARGET
    )


def resolve_kv(
    request: PlanRequest,
    asked: KVRequest,
    checkpoint: CheckpointKV,
    model: str,
    geometry: ModelGeometry,
    role: Role,
) -> KVPlan:
    """What every layer of one model stores, and which backend serves it. Raises like `resolve`."""
    compute, because = resolve_compute_dtype(request.dtype, geometry, request.device)
    only = request.backend if role is Role.TARGET else None

    def need(layer: LayerGeometry, k: KVDtype, v: KVDtype | None) -> Need:
        of_rank = rank_layer(layer, request.tensor_parallel_size)  # which is what a backend serves
        return Need(
            of_rank, k, v, compute, request.page_size, request.device, request.batch_invariant
        )

    def serve(layer: LayerGeometry, k: KVDtype, v: KVDtype | None) -> Served:
        if geometry.not_runnable is not None:
            return allow(need(layer, k, v), not_runnable=geometry.not_runnable)
        return select(need(layer, k, v), only=only)

    def works(changed: PlanRequest) -> bool:
        try:
            resolve_kv(changed, asked, checkpoint, model, geometry, role)
        except ConfigError:
            return False
        return True

    def otherwise(layer: LayerGeometry, k: KVDtype, v: KVDtype | None) -> tuple[WayOut, ...]:
        ways = _other_ways(need(layer, k, v), only, role)
        wide = compute in (ComputeDtype.FLOAT32, ComputeDtype.FLOAT64)
        # A whole resolution, because the stored format may follow the compute dtype.
        if only is not None and wide and works(replace(request, dtype=ComputeDtype.BFLOAT16)):
            text = "compute in 16 bits, which this backend does"
            ways = (*ways, WayOut(text, ("--dtype", ComputeDtype.BFLOAT16.value)))
        return ways

    around = Surroundings(
        role=role,
        model=model,
        compute_dtype=compute,
        compute_because=because,
        page_size=request.page_size,
        device_encodings=device_encodings(request.device),
        serve=serve,
        otherwise=otherwise,
    )
    return resolve(asked, checkpoint, geometry, around)


def _other_ways(need: Need, only: BackendInfo | None, role: Role) -> tuple[WayOut, ...]:
    """Page size or backend that would serve a layer which no backend serves as requested."""
    ways = []
    usual = replace(need, page_size=DEFAULT_PAGE_SIZE)
    if usual != need and select(usual, only=only).is_served:
        ways.append(WayOut("take pages of the usual size", ("--page-size", str(usual.page_size))))
    if only is not None and select(need).is_served:
        ways.append(WayOut("let Kvant choose the backend", ("--attention-backend", "auto")))
    elif role is Role.TARGET and select(need, only=REFERENCE).is_served:
        slow = ("--attention-backend", REFERENCE.name)
        ways.append(WayOut("take the slow backend that can", slow))
    return tuple(ways)


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
