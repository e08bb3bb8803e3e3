"""What a GPU holds beside weights and pages is counted, shown, and taken off the pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvant.attention.base import Step
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.engine import build
from kvant.engine.build import plan_engine
from kvant.errors import DoesNotFit
from kvant.execution.graphs import StepGraphs
from kvant.kv.dtype import ComputeDtype
from kvant.models.geometry import read_geometry
from kvant.models.weights import WeightBytes
from kvant.plan.budget import choose_kv_bytes
from kvant.plan.config import EngineConfig
from kvant.plan.plan_json import plan_json
from kvant.plan.planning import Plan, PlanRequest, make_plan
from kvant.plan.speculative_config import parse_speculative_config
from kvant.plan.workspaces import StepSize, workspaces
from tests.speculative.recorded import Again

CONFIG = Path(__file__).parents[1] / "configs" / "qwen3-8b.json"
H200 = DeviceFacts(DeviceKind.CUDA, "sm_90")
GIB = 2**30
TOTAL = int(139.8 * GIB)


@pytest.fixture
def request_(tmp_path: Path) -> PlanRequest:
    (tmp_path / "config.json").write_bytes(CONFIG.read_bytes())
    return PlanRequest(str(tmp_path), H200, max_model_len=17000)


@pytest.mark.parametrize(("seqs", "longest", "measured"), [(256, 17000, 2.48), (512, 40000, 2.88)])
def test_the_count_is_within_two_per_cent_of_an_h200s_memory(
    seqs: int, longest: int, measured: float
) -> None:
    """measured: GiB used beside weights and pages, at the peak of the loads in memory.md."""
    config = json.loads(CONFIG.read_text())
    found = workspaces(
        read_geometry(config), config, ComputeDtype.BFLOAT16, StepSize(seqs, 8192), longest
    )
    assert measured * GIB < found.total < measured * GIB + 0.02 * TOTAL


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_logits_that_recorded_steps_share_are_counted(
    request_: PlanRequest, *, adaptive: bool
) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 15, "adaptive": adaptive}
    step = StepSize(256, 8448)
    plain = make_plan(replace(request_, step=step))
    plan = make_plan(replace(request_, step=step, speculative=parse_speculative_config(given)))
    assert plan.draft_counts == ([15, 7, 3] if adaptive else [15])

    def recorded(num_drafts: list[int]) -> list[int]:
        """Rows of logits of every step."""
        rows: list[int] = []

        def forward(ids: torch.Tensor, step: Step, logits_index: torch.Tensor) -> torch.Tensor:
            rows.append(len(logits_index))
            return torch.zeros(len(logits_index), 2)

        graphs = StepGraphs(
            forward, step.seqs, page_size=16, max_model_len=64, device=torch.device("cpu"),
            recorder=Again(), draft=lambda tokens, _: tokens, num_drafts=num_drafts,
        )  # fmt: skip
        graphs.capture()
        return rows

    with_drafts, without = recorded(plan.draft_counts), recorded([])
    wider = max(with_drafts) - max(without)
    assert plan.workspaces is not None
    assert plain.workspaces is not None
    vocab = plan.target.geometry.vocab_size
    assert plan.workspaces.logits - plain.workspaces.logits == vocab * 12 * wider


@pytest.mark.parametrize("longest", [2048, 40960])
def test_parts_of_batch_invariant_attention_are_counted_up_to_what_a_launch_takes(
    request_: PlanRequest, longest: int
) -> None:
    asked = replace(request_, max_model_len=longest, step=StepSize(64, 8256))
    plans = [make_plan(replace(asked, batch_invariant=on)) for on in (False, True)]
    without, counted = (plan.workspaces.prompts for plan in plans if plan.workspaces is not None)
    item = 8 * 16 * 129 * 4  # KV heads, rows, a row's numbers and their sum
    splits = longest // 1024
    launched, recorded = (8256 * 4 // 16 + 64) * splits * item, 64 * splits * item
    wanted = 1.25 * (min(GIB, launched) + recorded)
    assert 0 <= wanted - (counted - without) < 2


def test_parts_add_up_to_the_share_that_was_asked(request_: PlanRequest) -> None:
    for share in (0.5, 0.9):
        asked = replace(request_, memory_bytes=TOTAL, memory_utilization=share)
        plan = make_plan(asked)
        memory = plan.memory
        assert plan.workspaces is not None
        assert memory.workspace_bytes == plan.workspaces.total > GIB
        used = (memory.weights_bytes or 0) + memory.workspace_bytes + (memory.kv_bytes or 0)
        assert 0 <= share * TOTAL - used < 2 * plan.page_bytes
        shown = plan_json(plan)["memory"]
        assert sum(shown["workspaces"].values()) == shown["workspace_bytes"]


def test_an_engine_gives_pages_what_the_plan_does(request_: PlanRequest) -> None:
    asked = replace(request_, memory_utilization=0.85)
    planned = make_plan(replace(asked, memory_bytes=TOTAL)).memory.kv_bytes
    given = choose_kv_bytes(make_plan(asked), int(0.99 * TOTAL), TOTAL, 256)
    assert planned is not None
    assert 0 <= given - planned < 2 * make_plan(asked).page_bytes


def test_the_share_of_a_gpu_is_not_a_cpus(request_: PlanRequest) -> None:
    cpu = replace(request_, device=DeviceFacts(DeviceKind.CPU), memory_bytes=TOTAL)
    plans = [make_plan(replace(cpu, memory_utilization=share)) for share in (0.5, 0.9)]
    assert plans[0].memory == plans[1].memory


def test_what_others_hold_is_not_given_away(request_: PlanRequest) -> None:
    plan = make_plan(request_)
    free = TOTAL // 2
    given = choose_kv_bytes(plan, free, TOTAL, 256)
    assert given + (plan.weights_bytes or 0) + plan.memory.workspace_bytes == free


def test_a_share_too_small_says_which_would_do(request_: PlanRequest) -> None:
    plan = make_plan(replace(request_, memory_utilization=0.1))
    with pytest.raises(DoesNotFit) as refused:
        choose_kv_bytes(plan, TOTAL, TOTAL, 256)
    assert ("--gpu-memory-utilization", "0.9") in [way.arguments for way in refused.value.ways_out]


def test_a_share_that_would_not_do_either_is_no_way_out(request_: PlanRequest) -> None:
    plan = make_plan(replace(request_, memory_utilization=0.1))
    with pytest.raises(DoesNotFit) as refused:
        choose_kv_bytes(plan, plan.memory.workspace_bytes, TOTAL, 256)
    assert all("--gpu-memory-utilization" not in way.arguments for way in refused.value.ways_out)


def test_an_explicit_size_is_held_against_what_workspaces_leave(request_: PlanRequest) -> None:
    plan = make_plan(request_)
    left = TOTAL - (plan.weights_bytes or 0) - plan.memory.workspace_bytes
    fits = make_plan(replace(request_, kv_cache_bytes=left))
    assert choose_kv_bytes(fits, TOTAL, TOTAL, 256) == left
    asked = replace(request_, kv_cache_bytes=left + GIB)
    with pytest.raises(DoesNotFit, match="left beside workspaces") as refused:
        choose_kv_bytes(make_plan(asked), TOTAL, TOTAL, 256)
    way = next(way.arguments for way in refused.value.ways_out if way.arguments)
    given = replace(request_, kv_cache_bytes=int(way[1]))
    assert choose_kv_bytes(make_plan(given), TOTAL, TOTAL, 256) == int(way[1])
    warnings = make_plan(replace(asked, memory_bytes=TOTAL)).warnings
    assert any("more than the device has" in line for line in warnings)


def test_weights_that_no_config_tells_are_taken_off_the_pages_once_their_files_are_here(
    request_: PlanRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a hub model in codes that Kvant has no recipe for, at its first start."""
    known = make_plan(request_)
    assert known.weights_bytes is not None

    def plan(request: PlanRequest, *, weights: bool = False) -> Plan:
        made = make_plan(request)
        if weights:
            return made
        return replace(made, target=replace(made.target, weights=WeightBytes(None, None, "unread")))

    monkeypatch.setattr(build, "make_plan", plan)
    monkeypatch.setattr(build, "locate", lambda *given, **options: None)
    monkeypatch.setattr(build, "total_bytes", lambda device: TOTAL)
    monkeypatch.setattr(build, "free_bytes", lambda device: TOTAL)
    planned, _, _ = plan_engine(EngineConfig(request_, 256, 8448))
    given = planned.request.kv_cache_bytes
    assert given == choose_kv_bytes(known, TOTAL, TOTAL, 256)
    assert given + known.weights_bytes + known.memory.workspace_bytes <= 0.9 * TOTAL


def test_where_little_is_left_the_way_out_still_holds_a_page(request_: PlanRequest) -> None:
    plan = make_plan(request_)
    least = 2 * plan.page_bytes
    free = (plan.weights_bytes or 0) + plan.memory.workspace_bytes + least
    with pytest.raises(DoesNotFit) as refused:
        choose_kv_bytes(make_plan(replace(request_, kv_cache_bytes=GIB)), free, TOTAL, 256)
    assert ("--kv-cache-memory", str(least)) in [way.arguments for way in refused.value.ways_out]
    with pytest.raises(DoesNotFit, match="0 B that are left") as refused:
        choose_kv_bytes(make_plan(replace(request_, kv_cache_bytes=GIB)), GIB // 2, TOTAL, 256)
    assert "take smaller steps" in str(refused.value)


def test_more_sequences_and_larger_steps_take_more(request_: PlanRequest) -> None:
    def total(**changes: object) -> int:
        return make_plan(replace(request_, **changes)).memory.workspace_bytes  # type: ignore[arg-type]

    usual = total()
    assert total(step=StepSize(512, 8192)) > usual
    assert total(step=StepSize(256, 16384)) > usual
    assert total(max_model_len=40000) > usual
    on_cpu = DeviceFacts(DeviceKind.CPU)
    assert total(device=on_cpu) == 0
