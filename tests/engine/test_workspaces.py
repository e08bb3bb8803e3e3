"""What a GPU holds beside weights and pages is counted, shown, and taken off the pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from kvant.plan.budget import choose_kv_bytes
from kvant.plan.config import EngineConfig
from kvant.plan.facts import DeviceMemory
from kvant.plan.limits import Limits
from kvant.plan.plan import Plan, PlanRequest
from kvant.plan.plan_json import plan_json
from kvant.plan.planning import make_plan
from kvant.plan.read_facts import read_facts
from kvant.plan.speculative_config import parse_speculative_config
from kvant.plan.workspaces import workspaces
from tests.planned import plan_of
from tests.speculative.recorded import Again

CONFIG = Path(__file__).parents[1] / "configs" / "qwen3-8b.json"
H200 = DeviceFacts(DeviceKind.CUDA, "sm_90")
GIB = 2**30
TOTAL = int(139.8 * GIB)
HERE = DeviceMemory(TOTAL, TOTAL)


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
        read_geometry(config), config, ComputeDtype.BFLOAT16, Limits(seqs, 8192, longest, 16)
    )
    assert measured * GIB < found.total < measured * GIB + 0.02 * TOTAL


def test_the_count_for_a_hybrid_is_within_two_per_cent_of_an_h200s_memory() -> None:
    """Qwen3.5-9B, steps of 8256 tokens: 1.58 GiB when ready, and 64 x 1024/64 allocated 1.38 more."""
    config = json.loads(CONFIG.with_name("qwen3.5-9b.json").read_text())
    found = workspaces(
        read_geometry(config), config, ComputeDtype.BFLOAT16, Limits(64, 8256, 32768, 16)
    )
    measured = 2.96 * GIB
    assert measured < found.total < measured + 0.02 * TOTAL


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_logits_that_recorded_steps_share_are_counted(
    request_: PlanRequest, *, adaptive: bool
) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 15, "adaptive": adaptive}
    plain = plan_of(request_)
    plan = plan_of(replace(request_, speculative=parse_speculative_config(given)))
    assert plan.draft_counts == ((15, 7, 3) if adaptive else (15,))

    def recorded(num_drafts: Sequence[int]) -> list[int]:
        """Rows of logits of every step."""
        rows: list[int] = []

        def forward(ids: torch.Tensor, step: Step, logits_index: torch.Tensor) -> torch.Tensor:
            rows.append(len(logits_index))
            return torch.zeros(len(logits_index), 2)

        graphs = StepGraphs(
            forward, plan.limits.max_num_seqs, max_num_batched_tokens=0, page_size=16, max_model_len=64,
            device=torch.device("cpu"), recorder=Again(), run=lambda batch, ids: torch.empty(0),
            draft=lambda tokens, _: tokens, num_drafts=num_drafts,
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
    asked = replace(request_, max_model_len=longest, max_num_seqs=64)
    plans = [plan_of(replace(asked, batch_invariant=on)) for on in (False, True)]
    without, counted = (plan.workspaces.prompts for plan in plans if plan.workspaces is not None)
    item = 8 * 16 * 129 * 4  # KV heads, rows, a row's numbers and their sum
    splits = longest // 1024
    launched, recorded = (8256 * 4 // 16 + 64) * splits * item, 64 * splits * item
    wanted = 1.25 * (min(GIB, launched) + recorded)
    assert 0 <= wanted - (counted - without) < 2


def test_parts_add_up_to_the_share_that_was_asked(request_: PlanRequest) -> None:
    for share in (0.5, 0.9):
        asked = replace(request_, memory_bytes=TOTAL, memory_utilization=share)
        plan = plan_of(asked)
        memory = plan.memory
        assert plan.workspaces is not None
        assert memory.workspace_bytes == plan.workspaces.total > GIB
        used = (memory.weights_bytes or 0) + memory.workspace_bytes + (memory.kv_bytes or 0)
        assert 0 <= share * TOTAL - used < 2 * plan.page_bytes
        shown = plan_json(plan)["memory"]
        assert sum(shown["workspaces"].values()) == shown["workspace_bytes"]


def test_an_engine_gives_pages_what_the_plan_does(request_: PlanRequest) -> None:
    asked = replace(request_, memory_utilization=0.85)
    planned = plan_of(replace(asked, memory_bytes=TOTAL)).memory.kv_bytes
    given = choose_kv_bytes(plan_of(asked), DeviceMemory(int(0.99 * TOTAL), TOTAL))
    assert planned is not None
    assert 0 <= given - planned < 2 * plan_of(asked).page_bytes


def test_the_share_of_a_gpu_is_not_a_cpus(request_: PlanRequest) -> None:
    cpu = replace(request_, device=DeviceFacts(DeviceKind.CPU), memory_bytes=TOTAL)
    plans = [plan_of(replace(cpu, memory_utilization=share)) for share in (0.5, 0.9)]
    assert plans[0].memory == plans[1].memory


def test_what_others_hold_is_not_given_away(request_: PlanRequest) -> None:
    plan = plan_of(request_)
    free = TOTAL // 2
    given = choose_kv_bytes(plan, DeviceMemory(free, TOTAL))
    assert given + (plan.weights_bytes or 0) + plan.memory.workspace_bytes == free


def test_a_share_too_small_says_which_would_do(request_: PlanRequest) -> None:
    plan = plan_of(replace(request_, memory_utilization=0.1))
    with pytest.raises(DoesNotFit) as refused:
        choose_kv_bytes(plan, HERE)
    assert ("--gpu-memory-utilization", "0.9") in [way.arguments for way in refused.value.ways_out]


def test_a_share_that_would_not_do_either_is_no_way_out(request_: PlanRequest) -> None:
    plan = plan_of(replace(request_, memory_utilization=0.1))
    with pytest.raises(DoesNotFit) as refused:
        choose_kv_bytes(plan, DeviceMemory(plan.memory.workspace_bytes, TOTAL))
    assert all("--gpu-memory-utilization" not in way.arguments for way in refused.value.ways_out)


def test_an_explicit_size_is_held_against_what_workspaces_leave(request_: PlanRequest) -> None:
    plan = plan_of(request_)
    left = TOTAL - (plan.weights_bytes or 0) - plan.memory.workspace_bytes
    fits = plan_of(replace(request_, kv_cache_bytes=left))
    assert choose_kv_bytes(fits, HERE) == left
    asked = replace(request_, kv_cache_bytes=left + GIB)
    with pytest.raises(DoesNotFit, match="left beside workspaces") as refused:
        choose_kv_bytes(plan_of(asked), HERE)
    way = next(way.arguments for way in refused.value.ways_out if way.arguments)
    given = replace(request_, kv_cache_bytes=int(way[1]))
    assert choose_kv_bytes(plan_of(given), HERE) == int(way[1])
    warnings = plan_of(replace(asked, memory_bytes=TOTAL)).warnings
    assert any("more than the device has" in line for line in warnings)


def test_a_plan_is_made_again_only_where_downloaded_weights_add_facts(
    request_: PlanRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a hub model whose config does not give the size of its weights, at its first start."""
    known = replace(read_facts(request_), memory=HERE)
    expected = make_plan(request_, known)
    unread = {**known.target.config, "quantization_config": {"quant_method": "unheard-of"}}
    target = replace(known.target, weights=replace(known.target.weights, config=unread))
    found = [replace(known, target=target), known]
    plans: list[Plan] = []
    monkeypatch.setattr(build, "read_facts", lambda *given, **options: found.pop(0))
    monkeypatch.setattr(
        build, "make_plan", lambda *given: plans.append(make_plan(*given)) or plans[-1]
    )
    assert plan_engine(EngineConfig(request_)) == expected
    first, _ = plans
    assert (first.weights_bytes, first.kv_cache_bytes, first.refusal) == (None, None, None)
    assert expected.kv_cache_bytes is not None
    assert expected.weights_bytes is not None
    used = expected.kv_cache_bytes + expected.weights_bytes + expected.memory.workspace_bytes
    assert used <= 0.9 * TOTAL

    found, plans[:] = [known, replace(known)], []
    assert plan_engine(EngineConfig(request_)) == expected
    assert len(plans) == 1


@pytest.mark.parametrize("device", [H200, DeviceFacts(DeviceKind.CPU)], ids=["gpu", "cpu"])
def test_planning_reads_no_file(
    request_: PlanRequest, device: DeviceFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = replace(request_, device=device, dtype=ComputeDtype.FLOAT32)
    facts = replace(read_facts(request), memory=HERE)

    def refuse(*given: object, **options: object) -> None:
        raise AssertionError(f"planning opened {given[0]}")

    for name in ("open", "read_text", "read_bytes", "stat", "exists", "is_file", "glob"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr("builtins.open", refuse)
    assert make_plan(request, facts) == make_plan(request, facts)


def test_an_engine_needs_the_size_of_its_weights_or_of_its_pages(
    request_: PlanRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(CONFIG.read_text()) | {
        "quantization_config": {"quant_method": "unheard-of"}
    }
    (Path(request_.model) / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("kvant.plan.read_facts.device_memory", lambda *_: HERE)
    with pytest.raises(DoesNotFit, match="unknown size") as refused:
        plan_engine(EngineConfig(request_, dummy_weights=True))
    assert "--kv-cache-memory" in str(refused.value)
    asked = replace(request_, kv_cache_bytes=8 * GIB)
    planned = plan_engine(EngineConfig(asked, dummy_weights=True))
    assert planned.kv_cache_bytes == 8 * GIB


def test_where_little_is_left_the_way_out_still_holds_a_page(request_: PlanRequest) -> None:
    plan = plan_of(request_)
    least = 2 * plan.page_bytes
    free = (plan.weights_bytes or 0) + plan.memory.workspace_bytes + least
    with pytest.raises(DoesNotFit) as refused:
        choose_kv_bytes(plan_of(replace(request_, kv_cache_bytes=GIB)), DeviceMemory(free, TOTAL))
    assert ("--kv-cache-memory", str(least)) in [way.arguments for way in refused.value.ways_out]
    with pytest.raises(DoesNotFit, match="0 B that are left") as refused:
        choose_kv_bytes(
            plan_of(replace(request_, kv_cache_bytes=GIB)), DeviceMemory(GIB // 2, TOTAL)
        )
    assert "take smaller steps" in str(refused.value)


def test_more_sequences_and_larger_steps_take_more(request_: PlanRequest) -> None:
    def total(**changes: object) -> int:
        return plan_of(replace(request_, **changes)).memory.workspace_bytes  # type: ignore[arg-type]

    usual = total()
    assert total(max_num_seqs=512, max_num_batched_tokens=8192) > usual
    assert total(max_num_batched_tokens=16384) > usual
    assert total(max_model_len=40000) > usual
    on_cpu = DeviceFacts(DeviceKind.CPU)
    assert total(device=on_cpu) == 0
