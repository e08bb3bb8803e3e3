"""How much memory the pages get, and what is refused because it would not fit."""

from __future__ import annotations

from collections.abc import Sequence

from kvant.attention.need import DeviceKind
from kvant.errors import DoesNotFit, WayOut
from kvant.kv.memory import SCRATCH_PAGES, UTILIZATION, format_size
from kvant.plan.planning import Plan
from kvant.plan.what_if import what_if

CPU_SHARE = 0.25
"""Share of a CPU's free memory that pages get when nobody says how much."""

_USE_MORE = WayOut("use more of the device", ("--gpu-memory-utilization", str(UTILIZATION)))


def choose_kv_bytes(plan: Plan, free: int, total: int, max_num_seqs: int) -> int:
    """Bytes for the pages: what was asked, else the device's share, but never more than can be used.

    free, total: bytes of the device, before anything is loaded. Raises DoesNotFit where the weights
    and what was asked are more than that.
    """
    weights = plan.weights_bytes or 0
    asked = plan.request.kv_cache_bytes
    if asked is not None:
        most = free - plan.memory.workspace_bytes
        if weights + asked > most:
            raise _no_room(plan, weights, asked, most)
        return asked
    most = free
    if plan.request.device.kind is DeviceKind.CPU:
        share = int(free * CPU_SHARE)
    else:
        most = _most(plan, free, total, plan.request.memory_utilization)
        share = most - weights
    usable = most_bytes(plan.target.geometry.max_model_len, plan, max_num_seqs)
    chosen = share if usable is None else min(share, usable)
    if chosen <= 0 or weights + chosen > most:
        wanted = max(chosen, plan.page_bytes * 2)
        on_gpu = plan.request.device.kind is not DeviceKind.CPU
        would_do = on_gpu and weights + wanted <= _most(plan, free, total, UTILIZATION)
        raise _no_room(plan, weights, wanted, most, [_USE_MORE] if would_do else [])
    return chosen


def _most(plan: Plan, free: int, total: int, utilization: float) -> int:
    """Bytes of a GPU for weights and pages."""
    return min(int(total * utilization), free) - plan.memory.workspace_bytes


def most_bytes(limit: int | None, plan: Plan, max_num_seqs: int) -> int | None:
    """Bytes that max_num_seqs sequences of the greatest length fill; None if no length is known."""
    longest = limit if plan.request.max_model_len is None else plan.request.max_model_len
    if longest is None:
        return None
    pages = max_num_seqs * -(-longest // plan.request.page_size)
    return (pages + SCRATCH_PAGES) * plan.page_bytes


def choose_max_model_len(plan: Plan) -> tuple[int, str | None]:
    """Tokens of one sequence, and a line for the user where the pool decided.

    An explicit length that the pool cannot hold is DoesNotFit, with what would.
    """
    capacity = plan.memory.capacity_tokens or 0
    wanted = plan.request.max_model_len
    if capacity == 0:
        asked = plan.request.kv_cache_bytes or 0
        needed = plan.page_bytes * (SCRATCH_PAGES + 1)
        raise DoesNotFit(
            f"{format_size(asked)} of KV cache hold not a single page of {plan.target.local.name}",
            why=f"a page and the scratch page of {plan.target.kv.page_size} tokens take "
            f"{format_size(needed)}",
            ways_out=(WayOut("give it more", ("--kv-cache-memory", str(needed))),),
        )
    limit = plan.target.geometry.max_model_len
    if wanted is None:
        if limit is not None and limit <= capacity:
            return limit, None
        given = format_size(plan.request.kv_cache_bytes or 0)
        return capacity, (
            f"max_model_len is {capacity}: what {given} of KV cache hold"
            + ("" if limit is None else f" (the model could address {limit})")
        )
    if wanted > capacity:
        raise _too_long(plan, wanted, capacity)
    return wanted, None


def _too_long(plan: Plan, wanted: int, capacity: int) -> DoesNotFit:
    page_size = plan.request.page_size
    pages = -(-wanted // page_size) + SCRATCH_PAGES
    return DoesNotFit(
        f"one sequence of --max-model-len {wanted} does not fit into "
        f"{format_size(plan.request.kv_cache_bytes or 0)} of KV cache",
        why=f"{plan.page_bytes // page_size} bytes a token leave room for {capacity}",
        tried=[
            f"--kv-cache-dtype {other.format!s:<20} holds {other.capacity_tokens:>9,} tokens"
            for other in what_if(plan)
            if other.capacity_tokens is not None
        ],
        ways_out=(
            WayOut("take a shorter one", ("--max-model-len", str(capacity))),
            WayOut("give it more memory", ("--kv-cache-memory", str(pages * plan.page_bytes))),
        ),
    )


def _no_room(
    plan: Plan, weights: int, kv: int, free: int, more: Sequence[WayOut] = ()
) -> DoesNotFit:
    left = free - weights
    ways = [*more]
    least = plan.page_bytes * (SCRATCH_PAGES + 1)
    if left >= least:
        # Half, as the rest of the machine wants some, and free memory varies from start to start.
        less = str(max(least, left // 2))
        ways.append(WayOut("give the pages less", ("--kv-cache-memory", less)))
    elif plan.memory.workspace_bytes:
        ways.append(WayOut("take smaller steps: --max-num-batched-tokens, --max-num-seqs"))
    ways.append(WayOut("use a smaller or quantised model, or free some memory"))
    return DoesNotFit(
        f"{plan.target.local.name} does not fit on this device",
        why=f"weights {format_size(weights)} and KV cache {format_size(kv)} are more than the "
        f"{format_size(max(0, free))} that are "
        + ("left beside workspaces" if plan.memory.workspace_bytes else "free"),
        ways_out=ways,
    )
