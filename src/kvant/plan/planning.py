"""Makes a plan from a request and facts, in one pure function. `kvant plan` and the engine both call it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvant.attention.need import LONG_STRIDE
from kvant.errors import BadValue, NotServable, WayOut
from kvant.kv.checkpoint.safetensors_header import bytes_of
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import ModelGeometry
from kvant.kv.request import KVRequest
from kvant.kv.spec import Role
from kvant.models.activations import with_activations
from kvant.models.forward_info import ForwardChoice, ForwardFacts
from kvant.models.geometry import DraftFacts, fix_rotary, read_draft_geometry
from kvant.models.quantization import check_quantization
from kvant.models.select import select_forward
from kvant.models.shape import ModelShape, ShapeSource
from kvant.models.sharding.shard import rank_geometry
from kvant.models.stored import (
    NotStored,
    Stored,
    declared_weights,
    names_in_files,
    read_stored,
)
from kvant.models.weight_audit import TensorState, Use, WeightAudit, audit_weights
from kvant.models.weights import (
    WeightBytes,
    models_weights,
    place_of_layers,
    quantized_weight_bytes,
    weight_bytes_of,
)
from kvant.plan.budget import fit
from kvant.plan.facts import Facts, ModelFacts
from kvant.plan.graph_sizes import draft_counts, short_piece
from kvant.plan.limits import Limits, default_num_batched_tokens, default_num_seqs
from kvant.plan.plan import Plan, PlannedModel, PlanRequest
from kvant.plan.ranks import check_ranks, divide
from kvant.plan.resolution import resolve_kv
from kvant.plan.speculative_config import FLAG, SpeculativeConfig
from kvant.plan.workspaces import workspaces
from kvant.speculative.dflash.files import audit_drafter, read_network

_STATE_STRIDES = {True: 512, False: 2048}
"""Tokens between kept recurrent states, where prompts are cut: on a CPU (True) and on a GPU (False)."""

_LEAST_STATES = 8
"""The fewest recurrent states that the prefix cache keeps by default."""

_MOST_DRAFT_STATES = 32
"""Most drafts of one step of a model with recurrent layers, since each draft has a state of its own."""


def make_plan(request: PlanRequest, facts: Facts) -> Plan:
    """Returns the plan for `request`. Pure: reads no file and no device.

    facts: of the target, with its shape, and of the drafter if the request names one. If facts.memory is
    given, the plan divides this machine's memory, chooses max_model_len, and says in `refusal` why an engine
    could not run it. Raises ConfigError for a request that is wrong on any device.
    """
    shape = facts.target.shape
    assert shape is not None, "a target has a shape"
    geometry = shape.geometry
    _check_length(request, geometry)
    geometry, rotary = fix_rotary(facts.target.config, geometry, request.max_model_len)
    ranks = request.tensor_parallel_size
    if ranks > 1:
        check_ranks(request, facts.target.config, shape)
    target = _plan_model(request, request.requests.target, facts.target, geometry, Role.TARGET)
    division = None
    if ranks > 1:
        target, division = divide(request, target, drafts=facts.draft is not None)
    asked = _forward_facts(request, facts.target, geometry, target.kv.compute_dtype)
    forward = with_activations(select_forward(asked), request.activations, asked)
    _refuse_drafts_over_states(request, geometry)
    draft, draft_facts, draft_audit = _plan_draft(request, facts.draft, geometry)
    limits, counts = _limits_and_drafts(request, target, draft_facts)
    beside = None
    if not request.on_cpu:
        beside = workspaces(
            rank_geometry(geometry, ranks), target.config, target.kv.compute_dtype, limits, counts,
            batch_invariant=request.batch_invariant, forward_bytes=forward.extra_bytes,
        )  # fmt: skip
    audit = None
    if facts.target.tensors is not None:
        audit = audit_weights(facts.target.tensors, _use(shape, target, forward, ranks))
        if division is None:
            target = _without_unread(request, facts.target, target, forward, audit)
    memory = facts.memory
    plan = Plan(
        request, target, forward, rotary, draft, draft_facts, counts, limits,
        total_bytes=request.memory_bytes if memory is None else memory.total,
        kv_cache_bytes=request.kv_cache_bytes, workspaces=beside, division=division,
        audit=audit, draft_audit=draft_audit,
    )  # fmt: skip
    if memory is not None:
        plan = fit(plan, memory)
    if geometry.not_runnable is not None:
        refusal = NotServable(
            f"{request.model} can be planned, but not run yet", why=geometry.not_runnable
        )
        plan = replace(plan, refusal=refusal)
    return plan


def _check_length(request: PlanRequest, geometry: ModelGeometry) -> None:
    wanted, limit = request.max_model_len, geometry.max_model_len
    if wanted is not None and limit is not None and wanted > limit:
        raise BadValue(
            f"--max-model-len {wanted} is beyond what {request.model} can address",
            why=f"its positions end at {limit}",
            ways_out=(WayOut("take what it can", ("--max-model-len", str(limit))),),
        )


def _refuse_drafts_over_states(request: PlanRequest, geometry: ModelGeometry) -> None:
    """Refuses drafters for models with recurrent layers, except methods without a model on one device."""
    asked = request.speculative
    if asked is None or not geometry.has_states:
        return
    if asked.method.has_model:
        why = "only the host knows which drafts' states to go on from, and this method drafts on the device"
        ways = [WayOut("draft from the text itself", (FLAG, '{"method": "ngram"}'))]
    elif request.tensor_parallel_size > 1:
        why, ways = "states behind drafts are not kept on several ranks yet", []
    else:
        return
    raise NotServable(
        f"{FLAG} is not offered for {request.model} as asked",
        why=why,
        ways_out=(*ways, WayOut("run without --speculative-config")),
    )


def _refuse_offload(request: PlanRequest, geometry: ModelGeometry, limits: Limits) -> None:
    """Raises if the plan cannot use --kv-offload or --kv-transfer."""
    if request.offload is None:
        if request.transfer is not None:
            raise BadValue(
                "--kv-transfer needs --kv-offload",
                why="pages pass from engine to engine through host memory",
                ways_out=(WayOut("give it some", ("--kv-offload", "host:8GiB")),),
            )
        return
    if not request.prefix_caching:
        raise BadValue(
            "--kv-offload needs the prefix cache",
            why="it keeps the pages that the prefix cache has no room for",
            ways_out=(WayOut("leave out one of --kv-offload and --no-enable-prefix-caching"),),
        )
    if geometry.has_states and not limits.state_slots:
        raise BadValue(
            f"--kv-offload is not available for {request.model} without kept states",
            why="a prefix continues from a state of its layers, and --state-cache-memory holds none",
            ways_out=(WayOut("leave out --state-cache-memory"),),
        )


def _limits_and_drafts(
    request: PlanRequest, target: PlannedModel, draft_facts: DraftFacts | None
) -> tuple[Limits, tuple[int, ...]]:
    """Returns the limits, with room for states behind drafts, and the numbers of drafts (`_draft_counts`)."""
    limits = _limits(request, target)
    _refuse_offload(request, target.geometry, limits)
    counts = _draft_counts(request.speculative, draft_facts, limits)
    if target.geometry.has_states and counts:
        places = min(_MOST_DRAFT_STATES, limits.max_num_seqs * max(counts))
        limits = replace(limits, draft_states=places)
    return limits, counts


def _limits(request: PlanRequest, target: PlannedModel) -> Limits:
    """Returns the requested limits, with the device's defaults for the others."""
    geometry = target.geometry
    seqs = request.max_num_seqs or default_num_seqs(request.device)
    slots = _state_slots(request, target, seqs)
    tokens = request.max_num_batched_tokens or default_num_batched_tokens(request.device, seqs)
    # Steps with pieces of prompts: short ones pay only where they are recorded.
    is_never_recorded = request.on_cpu or request.batch_invariant or geometry.has_states
    return Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=request.max_model_len or geometry.max_model_len or tokens,
        page_size=request.page_size,
        prefix_caching=request.prefix_caching and (slots > 0 or not geometry.has_states),
        prompt_stride=1 if request.on_cpu else LONG_STRIDE,
        short_piece=0 if is_never_recorded else short_piece(geometry.layers),
        state_slots=slots,
        state_stride=math.lcm(_STATE_STRIDES[request.on_cpu], request.page_size),
    )


def _state_slots(request: PlanRequest, target: PlannedModel, max_num_seqs: int) -> int:
    """Returns how many states the prefix cache keeps: as requested, else one per four sequences.

    At least a few: prompts of one client that takes turns between conversations leave one each.
    """
    each = target.kv.bytes_per_sequence
    if not each or not request.prefix_caching:
        return 0
    if request.state_cache_bytes is not None:
        return request.state_cache_bytes // each
    return max(_LEAST_STATES, -(-max_num_seqs // 4))


def _draft_counts(
    asked: SpeculativeConfig | None, facts: DraftFacts | None, limits: Limits
) -> tuple[int, ...]:
    """Returns the numbers of drafts for which steps are recorded, descending; none without a drafter."""
    if asked is None:
        return ()
    most = asked.num_speculative_tokens
    if most is None:
        most = asked.method.num_speculative_tokens if facts is None else facts.block_size - 1
    assert most is not None, "a method without a drafter has a default"
    room = limits.max_num_batched_tokens
    if most >= room:
        raise BadValue(
            f"--speculative-config: num_speculative_tokens {most} is more than a step holds",
            why=f"it runs a token and its drafts, and has room for {room}",
            ways_out=(
                WayOut("take larger steps", ("--max-num-batched-tokens", str(most + 1))),
                WayOut("draft fewer tokens" if room > 1 else "do without drafts"),
            ),
        )
    return tuple(draft_counts(most, adaptive=asked.adaptive))


def _plan_draft(
    request: PlanRequest, facts: ModelFacts | None, target: ModelGeometry
) -> tuple[PlannedModel | None, DraftFacts | None, WeightAudit | None]:
    """Plans the drafter from its own request, checkpoint and geometry, in the same way as the target.

    facts: of the drafter; without one there is no result. The audit is None without files to look into.
    """
    asked = request.speculative
    if asked is None or facts is None:
        return None, None, None
    geometry, draft_facts = read_draft_geometry(facts.config, target)
    read_network(facts.config)
    most = draft_facts.block_size - 1
    wanted = asked.num_speculative_tokens
    if wanted is not None and wanted > most:
        raise BadValue(
            f"--speculative-config: num_speculative_tokens {wanted} is more than {asked.model} drafts",
            why=f"its block of {draft_facts.block_size} drafts at most {most} tokens",
            ways_out=(WayOut(f"leave num_speculative_tokens out, or give at most {most}"),),
        )
    kv = request.requests.for_draft()
    if asked.kv_cache_dtype is not None:
        kv = replace(kv, explicit=(asked.kv_cache_dtype, *kv.explicit))
    draft = _plan_model(request, kv, facts, geometry, Role.DRAFT)
    audit = None
    if facts.tensors is not None:
        audit = audit_drafter(facts.tensors, draft.config, draft.geometry, draft_facts, draft.kv)
    return draft, draft_facts, audit


def _in_words(stored: Stored | NotStored | None, facts: ModelFacts) -> str | None:
    """Describes how the checkpoint's narrow weights are used; None if it has none."""
    if isinstance(stored, NotStored):
        done = "decoded while they are loaded" if facts.are_decoded else "left to transformers"
        return f"{done}: {stored.reason}"
    return None if stored is None else stored.summary


def _use(shape: ModelShape, target: PlannedModel, forward: ForwardChoice, ranks: int) -> Use:
    """Returns what the plan does with the target's weights, for their audit."""
    listed = models_weights(target.config, target.geometry)
    names = names_in_files(target.config)
    return Use(
        declared=declared_weights(target.config),
        stored=forward.stored,
        decoded=target.narrow or "decoded while they are loaded",
        rounded=forward.quantization,
        activations=forward.activations,
        weights=None if isinstance(listed, str) else listed,
        kv=target.kv,
        rounds_head=ranks == 1,
        layers=place_of_layers(target.geometry),
        parameters=dict(shape.parameters),
        in_files=dict(shape.stored),
        linear=tuple(map(names.in_files, shape.linear)),
        embeddings=shape.embeddings,
        names=shape.names,
    )


def _forward_facts(
    request: PlanRequest, facts: ModelFacts, geometry: ModelGeometry, compute: ComputeDtype
) -> ForwardFacts:
    """Returns what the choice of the target's forward depends on."""
    return ForwardFacts(
        facts.config, geometry, compute, request.device, request.quantization,
        request.batch_invariant, request.tensor_parallel_size, facts.weights.matrices(geometry),
    )  # fmt: skip


def _stored(
    request: PlanRequest, config: Mapping[str, Any], geometry: ModelGeometry, compute: ComputeDtype
) -> Stored | NotStored | None:
    """Returns `read_stored`, or NotStored if the forward that runs on a CPU cannot use these weights."""
    found = read_stored(config, request.device, compute)
    if not isinstance(found, Stored) or not request.on_cpu:
        return found
    if request.quantization is not None:
        return NotStored(f"--quantization {request.quantization.value} rounds the numbers")
    facts = ForwardFacts(
        config, geometry, compute, request.device, batch_invariant=request.batch_invariant
    )
    forward = select_forward(facts)
    if forward.stored is None:
        why = next((one.reason for one in forward.refused if one.forward == "compiled"), "")
        return NotStored(f"the compiled forward does not run this model: {why}")
    return found


def _kept_matrices(
    request: PlanRequest, facts: ModelFacts, geometry: ModelGeometry, compute: ComputeDtype
) -> ComputeDtype | None:
    """`ForwardChoice.matrices` of the forward that will run the target."""
    if not request.on_cpu or facts.weights.matrices(geometry) is None:
        return None
    return select_forward(_forward_facts(request, facts, geometry, compute)).matrices


def _weights(
    facts: ModelFacts,
    geometry: ModelGeometry,
    compute: ComputeDtype,
    stored: Stored | NotStored | None,
    matrices: ComputeDtype | None,
) -> WeightBytes:
    """Returns the bytes of weights that are not rounded while they are loaded.

    stored: from `_stored`. matrices: from `_kept_matrices`; None for a drafter.
    """
    return weight_bytes_of(
        facts.weights, facts.config, geometry,
        compute=compute,
        decoded=facts.are_decoded and not isinstance(stored, Stored),
        num_weights=None if facts.shape is None else facts.shape.num_weights,
        parameters=facts.parameters,
        matrices=matrices,
        names=names_in_files(facts.config),
    )  # fmt: skip


def _without_unread(
    request: PlanRequest,
    facts: ModelFacts,
    target: PlannedModel,
    forward: ForwardChoice,
    audit: WeightAudit,
) -> PlannedModel:
    """Returns the target without bytes of tensors that nothing reads.

    They are towers of a text model, layers that predict further tokens, and unused scales.
    """
    if request.quantization is not None:
        return target  # its bytes are counted from the config
    sizes = dict(facts.weights.by_dtype or {})
    for one in audit.tensors:
        is_unread = one.state is TensorState.UNUSED
        if is_unread and one.dtype in sizes and one.shape is not None:
            sizes[one.dtype] -= bytes_of(one.dtype, one.shape)
    if sizes == facts.weights.by_dtype:
        return target
    read = replace(facts, weights=replace(facts.weights, by_dtype=sizes))
    geometry, compute = target.geometry, target.kv.compute_dtype
    stored = _stored(request, facts.config, geometry, compute)
    return replace(target, weights=_weights(read, geometry, compute, stored, forward.matrices))


def _plan_model(
    request: PlanRequest, asked: KVRequest, facts: ModelFacts, geometry: ModelGeometry, role: Role
) -> PlannedModel:
    """Returns the KV formats and the bytes of weights of the target or the drafter, undivided.

    asked: its KV formats. Raises ConfigError for formats or rounding that this model or device does not have.
    """
    config, quantization = facts.config, request.quantization
    kv = resolve_kv(request, asked, facts.checkpoint, facts.local.name, geometry, role)
    compute = kv.compute_dtype
    stored = _stored(request, config, geometry, compute)
    if role is Role.DRAFT:
        weights = _weights(facts, geometry, compute, stored, None)
    elif quantization is None:
        matrices = _kept_matrices(request, facts, geometry, compute)
        weights = _weights(facts, geometry, compute, stored, matrices)
    else:
        check_quantization(quantization, request.device, compute)
        weights = quantized_weight_bytes(
            config, geometry, quantization, compute=None if request.on_cpu else compute,
            ranks=request.tensor_parallel_size, parameters=facts.parameters,
        )  # fmt: skip
    return PlannedModel(
        facts.local, config, geometry, facts.checkpoint, weights, kv,
        refusal=facts.refusal,
        shape_source=ShapeSource.CONFIG if facts.shape is None else facts.shape.source,
        narrow=_in_words(stored, facts),
        parameters=facts.parameters,
    )  # fmt: skip
