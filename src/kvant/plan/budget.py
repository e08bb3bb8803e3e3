"""Chooses the memory of the pages and the longest sequence, and refuses plans that lack memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvant.errors import DoesNotFit, WayOut
from kvant.kv.groups import STATES, superblocks_for
from kvant.kv.memory import SCRATCH_PAGES, UTILIZATION, format_size, size_argument
from kvant.plan.facts import DeviceMemory
from kvant.plan.plan import Plan
from kvant.plan.resolution import what_if

CPU_SHARE = 0.25
"""Share of a CPU's free memory that pages get unless --kv-cache-memory is set."""

_USE_MORE = WayOut("use more of the device", ("--gpu-memory-utilization", str(UTILIZATION)))


def fit(plan: Plan, memory: DeviceMemory) -> Plan:
    """Returns the plan with kv_cache_bytes and max_model_len chosen for this memory, or with a refusal.

    The plan is unchanged if the weights' size is unknown and the request does not set kv_cache_bytes.
    """
    if plan.weights_bytes is None and plan.kv_cache_bytes is None:
        return plan
    try:
        plan = replace(plan, kv_cache_bytes=choose_kv_bytes(plan, memory))
        length, notes = choose_max_model_len(plan)
    except DoesNotFit as refusal:
        return replace(plan, refusal=refusal)
    return replace(plan, limits=replace(plan.limits, max_model_len=length), notes=notes)


def choose_kv_bytes(plan: Plan, memory: DeviceMemory) -> int:
    """Returns the bytes for pages: as requested, else the device's share, at most what sequences can fill.

    Raises DoesNotFit if weights and pages exceed the memory.
    """
    weights = plan.weights_bytes or 0
    beside = 0 if plan.workspaces is None else plan.workspaces.total
    beside += plan.draft_state_bytes
    asked = plan.request.kv_cache_bytes
    if asked is not None:
        if weights + asked > memory.free - beside:
            raise _no_room(plan, weights, asked, memory.free - beside)
        return asked

    def most(utilization: float) -> int:
        """Returns the bytes of a GPU for weights and pages."""
        return min(int(memory.total * utilization), memory.free) - beside

    if plan.request.on_cpu:
        room, share = memory.free - beside, int(memory.free * CPU_SHARE)
    else:
        room = most(plan.request.memory_utilization)
        share = room - weights
    chosen = share if plan.longest is None else min(share, _usable_bytes(plan, plan.longest))
    if chosen <= 0 or weights + chosen > room:
        wanted = max(chosen, plan.page_bytes * 2)
        would_do = not plan.request.on_cpu and weights + wanted <= most(UTILIZATION)
        raise _no_room(plan, weights, wanted, room, [_USE_MORE] if would_do else [])
    return chosen


def _usable_bytes(plan: Plan, longest: int) -> int:
    """Returns the bytes that max_num_seqs sequences of `longest` tokens fill, including kept states."""
    limits, layout = plan.limits, plan.layout
    pages = limits.max_num_seqs * -(-longest // limits.page_size)
    if layout is not None:
        piece = limits.max_num_batched_tokens
        held = [g.most_pages(longest, piece, limits.page_size) for g in layout.groups]
        most = [
            limits.max_num_seqs * n + (limits.state_slots if group.window == STATES else 0)
            for n, group in zip(held, layout.groups, strict=True)
        ]
        pages = superblocks_for(most, [g.per_superblock for g in layout.groups])
    return (pages + SCRATCH_PAGES) * plan.page_bytes


def choose_max_model_len(plan: Plan) -> tuple[int, tuple[str, ...]]:
    """Returns the most tokens of one sequence, and a note for the user if the pool's size limits it.

    Raises DoesNotFit, saying what would fit, if the pool cannot hold the requested length.
    """
    capacity = plan.memory.capacity_tokens or 0
    wanted = plan.request.max_model_len
    given = format_size(plan.kv_cache_bytes or 0)
    if capacity == 0:
        more = size_argument(plan.bytes_for(wanted or 1))
        raise DoesNotFit(
            f"{given} of KV cache hold not a single page of {plan.target.local.name}",
            why=f"one of its pages of {plan.limits.page_size} tokens and the scratch page take "
            f"{format_size(plan.bytes_for(1))}",
            ways_out=(WayOut("give it more", ("--kv-cache-memory", more)),),
        )
    if wanted is not None:
        if wanted > capacity:
            raise _too_long(plan, wanted, capacity)
        return wanted, ()
    limit = plan.target.geometry.max_model_len
    if limit is not None and limit <= capacity:
        return limit, ()
    note = f"max_model_len is {capacity}: what {given} of KV cache hold"
    return capacity, (note if limit is None else f"{note} (the model could address {limit})",)


def _too_long(plan: Plan, wanted: int, capacity: int) -> DoesNotFit:
    needed = plan.bytes_for(wanted)
    return DoesNotFit(
        f"one sequence of --max-model-len {wanted} does not fit into "
        f"{format_size(plan.kv_cache_bytes or 0)} of KV cache",
        why=f"it takes {format_size(needed)}; there is room for {capacity} tokens",
        tried=[
            f"--kv-cache-dtype {other.format!s:<20} holds {other.capacity_tokens:>9,} tokens"
            for other in what_if(plan)
            if other.capacity_tokens is not None
        ],
        ways_out=(
            WayOut("take a shorter one", ("--max-model-len", str(capacity))),
            WayOut("give it more memory", ("--kv-cache-memory", size_argument(needed))),
        ),
    )


def _no_room(
    plan: Plan, weights: int, kv: int, free: int, more: Sequence[WayOut] = ()
) -> DoesNotFit:
    left = free - weights
    ways = [*more]
    least = plan.bytes_for(1)
    if left >= least:
        # Half of it, because other programs need some and free memory varies from start to start.
        less = str(max(least, left // 2))
        ways.append(WayOut("give the pages less", ("--kv-cache-memory", less)))
    elif plan.workspaces is not None:
        ways.append(WayOut("take smaller steps: --max-num-batched-tokens, --max-num-seqs"))
    ways.append(WayOut("use a smaller or quantised model, or free some memory"))
    return DoesNotFit(
        f"{plan.target.local.name} does not fit on this device",
        why=f"weights {format_size(weights)} and KV cache {format_size(kv)} are more than the "
        f"{format_size(max(0, free))} that are "
        + ("free" if plan.workspaces is None else "left beside workspaces"),
        ways_out=ways,
    )
