"""States of recurrent layers in the pages' arena: a plan says what fits, and bytes promise no more."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.kv.dtype import KVDtype
from kvant.kv.groups import STATES
from kvant.kv.names import FormatRequest
from kvant.kv.pages import SCRATCH, SharedPages, shared_pages
from kvant.kv.request import Asked, KVRequest, Requests
from kvant.plan.plan import Plan, PlanRequest
from tests import planned

CONFIGS = Path(__file__).parents[1] / "configs"


@cache
def directory(name: str) -> Path:
    made = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, made)
    (made / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    return made


def plan_of(
    name: str, stored: KVDtype, length: int, memory: int = 141 * 10**9, **options: Any
) -> Plan:
    """For a GPU of 141 GB at the default share, unless told otherwise."""
    request = PlanRequest(
        str(directory(name)), DeviceFacts(DeviceKind.CUDA, "sm_90"), memory_bytes=memory,
        requests=Requests(KVRequest(explicit=(Asked(FormatRequest(stored, stored), "test"),))),
        expected_length=length, **{"max_model_len": 40960, **options},
    )  # fmt: skip
    return planned.plan_of(request)


def filled(plan: Plan, length: int) -> int:
    """Sequences of `length` tokens that a real allocator of the plan's arena gives pages to."""
    layout, num = plan.layout, plan.memory.num_pages
    assert layout is not None
    assert num is not None
    shared = shared_pages(num, layout)
    count = 0
    while shared.allocate([-(-length // layout.page_size), 1]) is not None:
        count += 1
    return count


@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.5-27b"])
@pytest.mark.parametrize("length", [512, 32768])
def test_as_many_sequences_fit_as_bytes_promise(name: str, length: int) -> None:
    counts = {}
    for stored in (KVDtype.BFLOAT16, KVDtype.FP8_E4M3):
        plan = plan_of(name, stored, length)
        kv, memory = plan.target.kv, plan.memory
        assert memory.kv_bytes is not None
        assert plan.num_sequences is not None
        promised = memory.kv_bytes / (kv.bytes_per_sequence + length * kv.bytes_per_token)
        # One sequence that computes its prompt is counted whole, and a part of a sequence does not fit.
        assert plan.num_sequences >= 0.97 * promised - 1
        assert plan.num_sequences <= filled(plan, length) <= promised
        counts[stored] = plan.num_sequences / promised
    assert abs(counts[KVDtype.FP8_E4M3] / counts[KVDtype.BFLOAT16] - 1) <= 0.03


def test_75_sequences_of_gemma_3_12b_with_32768_tokens_fit_an_h200() -> None:
    """An H200 has 139.8 GiB. 40 of 48 layers keep the last 1,024 tokens."""
    length = 32768
    plan = plan_of(
        "gemma-3-12b", KVDtype.FP8_PER_TOKEN_HEAD, length, int(139.8 * 2**30),
        memory_utilization=0.85, max_model_len=None,
    )  # fmt: skip
    layout, num = plan.layout, plan.memory.num_pages
    assert layout is not None
    assert num is not None
    assert plan.num_sequences is not None
    assert plan.num_sequences >= 75
    shared = shared_pages(num, layout)
    held = [group.most_pages(length, 1, layout.page_size) for group in layout.groups]
    for _ in range(plan.num_sequences):
        assert shared.allocate(held) is not None


def test_a_layout_with_states_wastes_little_and_plans_what_is_allocated() -> None:
    plan = plan_of("qwen3.5-9b", KVDtype.BFLOAT16, 512)
    layout, memory = plan.layout, plan.memory
    assert layout is not None
    assert [group.window for group in layout.groups] == [None, STATES]
    assert layout.waste <= 0.03
    assert memory.num_pages is not None
    # The arena has these bytes; the share of the device that is left over is less than a superblock.
    assert memory.num_pages * layout.superblock_bytes == memory.kv_bytes
    assert memory.total_bytes is not None
    assert memory.kv_bytes is not None
    parts = memory.kv_bytes + (memory.weights_bytes or 0) + memory.workspace_bytes
    assert 0 <= memory.total_bytes * plan.request.utilization - parts <= layout.superblock_bytes + 1


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(1, 9)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("keep"), st.binary(min_size=1, max_size=1)),
        st.tuples(st.just("go on"), st.binary(min_size=1, max_size=1)),
        st.tuples(st.just("forget"), st.binary(min_size=1, max_size=1)),
    ),
    max_size=40,
)


@given(ACTIONS, st.integers(1, 5), st.integers(1, 3))
def test_states_and_pages_share_superblocks(
    actions: list[tuple[str, int | bytes]], pages: int, states: int
) -> None:
    """After any sequence of operations, every superblock has one owner and every page one state."""
    shared = SharedPages(7, [None, STATES], [pages, states])
    assert shared.states is not None
    running: list[tuple[list[int], list[int]]] = []
    for action, what in actions:
        if action in ("run", "go on"):
            count = what if isinstance(what, int) else 1
            kept = None if isinstance(what, int) else shared.states.find(what)
            joined = [[], [] if kept is None else [kept]]
            fits = shared.fit([count, 1], joined)
            if fits:
                shared.states.join(joined[1])
                taken = shared.allocate([count, 1])
                assert taken is not None
                assert kept not in taken[1]
                shared.states.release(joined[1])
                running.append((taken[0], taken[1]))
        elif action == "end" and running:
            assert isinstance(what, int)
            held, state = running.pop(what % len(running))
            shared.groups[0].release(held)
            shared.states.release(state)
        elif action == "keep" and isinstance(what, bytes) and shared.states.find(what) is None:
            made = shared.states.allocate(1)
            if made is not None:
                assert made[0] not in [page for _, state in running for page in state]
                shared.states.remember(made[0], what)
                shared.states.release(made)
        elif action == "forget" and isinstance(what, bytes):
            shared.states.forget(shared.states.match([what]))
        zeroed = shared.take_pages_to_zero()
        assert len(zeroed) == 1, "states are not cleared"
        assert SCRATCH not in [page for _, state in running for page in state]
        assert shared.audit([[held for held, _ in running], [state for _, state in running]]) == []
