"""Resolves the KV cache of one planned model, as requested and, for comparison, in every other format."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvant.attention.need import BackendInfo, Need
from kvant.attention.reference.info import INFO as REFERENCE
from kvant.attention.select import allow, device_encodings, select
from kvant.errors import ConfigError, WayOut
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.dtype import PAIR_NAMES, ComputeDtype, KVDtype
from kvant.kv.geometry import LayerGeometry, ModelGeometry
from kvant.kv.names import FormatRequest, known_names
from kvant.kv.request import Asked, KVRequest
from kvant.kv.resolve import Served, Surroundings, resolve
from kvant.kv.spec import KVPlan, Role
from kvant.kv.wide import wide_rows
from kvant.models.forward_info import ForwardFacts
from kvant.models.geometry.compute_dtype import resolve_compute_dtype
from kvant.models.quantization import Quantization, check_quantization
from kvant.models.select import select_forward
from kvant.models.sharding.shard import rank_layer
from kvant.models.weights import WeightBytes, estimate_weight_bytes, quantized_weight_bytes
from kvant.plan.plan import DEFAULT_PAGE_SIZE, Plan, PlanRequest
from kvant.plan.ranks import divide


def resolve_again(plan: Plan, asked: KVRequest) -> KVPlan:
    """Returns the target's KV plan for another request, from the facts of `plan`."""
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
    """Returns the format that every layer of one model stores, and its backend. Raises like `resolve`."""
    compute, because = resolve_compute_dtype(request.dtype, geometry, request.device)
    only = request.backend if role is Role.TARGET else None

    def need(layer: LayerGeometry, k: KVDtype, v: KVDtype | None) -> Need:
        of_rank = rank_layer(
            layer, request.tensor_parallel_size
        )  # a backend serves one rank's part
        wide = wide_rows(asked, layer, geometry, k, v, compute)
        return Need(
            of_rank, k, v, compute, request.page_size, request.device, request.batch_invariant, wide
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
        # `works` resolves the whole model, because the stored format may follow the compute dtype.
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
    """Returns page sizes and backends that would serve a layer that no backend serves as requested."""
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
    """The effect of one format as the global request, with the same rules and skips. refused: why not."""

    format: KVDtype
    bytes_per_token: int | None
    ratio_to_16bit: float | None
    capacity_tokens: int | None
    refused: str | None = None


def what_if(plan: Plan) -> tuple[Alternative, ...]:
    """Returns the effect of every format that users can name on this model, in the order of `KVDtype`.

    Returns nothing if every one has the same effect, because rules decide every layer.
    """
    nameable = [dtype for dtype in KVDtype if dtype.format.name in known_names()]
    found = [_alternative(plan, dtype) for dtype in nameable]
    stored = _stored(plan.target.kv)
    if all(kv is not None and _stored(kv) == stored for _, kv in found):
        return ()
    return tuple(other for other, _ in found)


def _stored(kv: KVPlan) -> list[object]:
    """Returns what each layer stores, without the reasons."""
    return [
        (spec.k and spec.k.dtype, spec.v and spec.v.dtype, spec.wide and dict(spec.wide.sides))
        for spec in kv.layers
    ]


def _alternative(plan: Plan, dtype: KVDtype) -> tuple[Alternative, KVPlan | None]:
    pair = PAIR_NAMES.get(dtype.format.name, (dtype, dtype))
    asked = Asked(FormatRequest(*pair), f"--kv-cache-dtype {dtype}")
    request = replace(plan.request.requests.target, explicit=(asked,))
    try:
        kv = resolve_again(plan, request)
    except ConfigError as fault:
        # The last backend that was tried is the reference, which has the format's own reason.
        refused = fault.tried[-1].partition(": ")[2] if fault.tried else fault.why or fault.what
        return Alternative(dtype, None, None, None, refused), None
    capacity = plan.memory_with(kv).capacity_tokens
    ratio = kv.bytes_per_token_16bit / kv.bytes_per_token if kv.bytes_per_token else None
    return Alternative(dtype, kv.bytes_per_token, ratio, capacity), kv


@dataclass(frozen=True, slots=True)
class WeightAlternative:
    """The effect of one method of `--quantization`; None stands for no method. tokens: how many tokens fit
    with each KV format of `what_if_weights`; None if none fit or the number is unknown.
    """

    asked: Quantization | None
    weights_bytes: int
    tokens: tuple[int | None, ...]


_COLUMNS = (KVDtype.FP8_E4M3, KVDtype.INT4_PER_TOKEN_HEAD)


def what_if_weights(plan: Plan) -> tuple[tuple[KVDtype, ...], tuple[WeightAlternative, ...]]:
    """Returns KV formats, and for each quantisation of the weights the tokens that fit with each format.

    Returns nothing if the memory is unknown, the pages' memory is fixed, or the weights cannot be rounded.
    """
    if plan.total_bytes is None or plan.kv_cache_bytes is not None:
        return (), ()
    columns: list[tuple[KVDtype, KVPlan]] = []
    for dtype in (plan.target.kv.compute_dtype.kv_dtype, *_COLUMNS):
        asked = Asked(FormatRequest(dtype, dtype), f"--kv-cache-dtype {dtype}")
        request = replace(plan.request.requests.target, explicit=(asked,))
        try:
            columns.append((dtype, resolve_again(plan, request)))
        except ConfigError:
            continue
    rows = []
    for method in (None, *Quantization):
        found = _rounded_weights(plan, method)
        size = None if found is None else found[0].bytes
        if found is None or size is None:
            continue
        weights, beside = found
        # The forward's extra memory comes out of the same total.
        held = replace(weights, bytes=size + beside - plan.forward.extra_bytes)
        other = replace(plan, target=replace(plan.target, weights=held))
        tokens = tuple(other.memory_with(kv).capacity_tokens for _, kv in columns)
        rows.append(WeightAlternative(method, size, tokens))
    if len(rows) < 2:
        return (), ()
    return tuple(dtype for dtype, _ in columns), tuple(rows)


def _rounded_weights(plan: Plan, method: Quantization | None) -> tuple[WeightBytes, int] | None:
    """Returns one rank's bytes of weights with this method, and the forward's extra bytes.

    Returns None if this model cannot use the method.
    """
    request, target = plan.request, plan.target
    compute = target.kv.compute_dtype
    if method == request.quantization:
        return target.weights, plan.forward.extra_bytes
    facts = ForwardFacts(
        target.config, target.geometry, compute, request.device, method, request.batch_invariant,
        plan.num_ranks,
    )  # fmt: skip
    try:
        if method is not None:
            check_quantization(method, request.device, compute)
        beside = select_forward(facts).extra_bytes
        if method is None:
            weights = estimate_weight_bytes(target.config, target.geometry, compute=compute)
        else:
            on_gpu = None if request.on_cpu else compute
            weights = quantized_weight_bytes(
                target.config, target.geometry, method, compute=on_gpu, ranks=plan.num_ranks
            )
        if plan.num_ranks > 1:
            whole = replace(target, weights=weights)
            divided, _ = divide(replace(request, quantization=method), whole, drafts=False)
            weights = divided.weights
        return weights, beside
    except ConfigError:
        return None
