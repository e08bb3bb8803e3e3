"""The engine on a GPU gives the CPU's answers, with steps launched ahead: python -m pytest -m gpu here."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvant import LLM, SamplingParams
from kvant.execution.batch import Launched
from kvant.scheduling.scheduler import Schedule
from tests.gpu import waiting_is_an_error
from tests.models import tiny
from tests.models.tiny_narrow import DIALECTS, build

pytestmark = pytest.mark.gpu

PROMPTS = [[5 + i % 110 for i in range(n)] for n in (3, 40, 17, 1, 300, 33, 64, 65, 2, 90)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20 + 7 * i, ignore_eos=i % 2 == 0)
    for i in range(len(PROMPTS))
]


def answers(path: Path, device: str, **options: object) -> list[tuple[int, ...]]:
    given = {"max_num_seqs": 16, "kv_cache_memory": "64MiB", **options}
    llm = LLM(path, device=device, dtype="float32", max_model_len=500, **given)  # type: ignore[arg-type]
    found = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
    llm.engine.audit()
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("qwen3", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[tuple[int, ...]]:
    return answers(path, "cpu", attention_backend="reference")


def test_a_gpu_gives_the_tokens_of_a_cpu(path: Path, expected: list[tuple[int, ...]]) -> None:
    assert answers(path, "cuda") == expected


def test_what_is_launched_ahead_is_used_and_forgotten_where_it_must_be(
    path: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvant.execution.graphs import StepGraphs

    launched: list[bool] = []
    launch = StepGraphs.launch

    def count(self: StepGraphs, schedule: Schedule, *given: Any) -> Launched:
        launched.append(bool(schedule.is_pending.any()))
        return launch(self, schedule, *given)

    monkeypatch.setattr(StepGraphs, "launch", count)
    assert answers(path, "cuda", kv_cache_memory="2MiB", max_num_seqs=4) == expected
    assert launched.count(True) > 50
    assert launched.count(False) >= 1


def test_steps_with_pieces_of_prompts_are_replayed(
    path: Path, expected: list[tuple[int, ...]], held: list[bool]
) -> None:
    assert answers(path, "cuda", max_num_batched_tokens=100) == expected
    assert held
    assert all(held)


def test_sampled_answers_do_not_depend_on_the_batch(path: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
    llm = LLM(path, device="cuda", dtype="float32", max_model_len=500, max_num_seqs=16,
              kv_cache_memory="64MiB")  # fmt: skip
    together = [r.token_ids for r in llm.generate(PROMPTS, params)]
    alone = [llm.generate([p], params)[0].token_ids for p in PROMPTS]
    assert together == alone


WISHES: tuple[dict[str, float], ...] = (
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 1.5, "min_p": 0.02},
)  # fmt: skip


@pytest.mark.parametrize("invariant", [False, True])
def test_drawn_tokens_are_those_of_steps_that_are_read_before_the_next_begins(
    path: Path, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no launch waits for the device."""
    from kvant.execution.graphs import StepGraphs
    from kvant.scheduling.request import Sequence

    params = [
        SamplingParams(seed=i, max_tokens=20 + 7 * i, ignore_eos=True, **WISHES[i % 5])  # type: ignore[arg-type]
        for i in range(len(PROMPTS))
    ]
    llm = LLM(path, device="cuda", dtype="float32", max_model_len=500, max_num_seqs=16,
              kv_cache_memory="64MiB", batch_invariant=invariant, enable_prefix_caching=False)  # fmt: skip
    drawn, launch = [], StepGraphs.launch

    def watched(self: StepGraphs, schedule: Schedule, *given: object) -> Launched:
        is_ahead = bool(schedule.is_pending.any())
        table = llm.engine.scheduler.table
        drawn.append(is_ahead and not table.is_greedy[schedule.rows].all())
        with waiting_is_an_error():
            return launch(self, schedule, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(StepGraphs, "launch", watched)
        found = [r.token_ids for r in llm.generate(PROMPTS, params)]
    assert drawn.count(True) > 50
    monkeypatch.setattr(Sequence, "needs_host", True)
    assert [r.token_ids for r in llm.generate(PROMPTS, params)] == found
    if invariant:
        alone = [llm.generate([p], [one])[0] for p, one in zip(PROMPTS, params, strict=True)]
        assert [r.token_ids for r in alone] == found
    llm.engine.audit()


@pytest.mark.parametrize(
    ("memory", "recorded"), [("64MiB", True), ("2MiB", True), ("64MiB", False)]
)
def test_requests_that_arrive_are_answered_by_steps_that_are_launched_ahead(
    path: Path,
    expected: list[tuple[int, ...]],
    memory: str,
    *,
    recorded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy ones beside drawn ones, prompts in pieces; no launch of a recorded step waits."""
    from kvant.execution import graphs
    from kvant.execution.graphs import StepGraphs
    from kvant.scheduling.request import Sequence

    params = list(PARAMS)
    for i in range(1, len(PROMPTS), 2):
        wish: dict[str, Any] = {"temperature": 1.0, **WISHES[i % 5]}
        params[i] = SamplingParams(seed=i, max_tokens=20 + 7 * i, ignore_eos=True, **wish)
    if not recorded:
        monkeypatch.setattr(graphs, "MOST_READ", 0)
        monkeypatch.setattr(graphs, "LONG", 0)
    llm = LLM(path, device="cuda", dtype="float32", max_model_len=500, max_num_seqs=8,
              max_num_batched_tokens=150, kv_cache_memory=memory, enable_prefix_caching=False)  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "needs_host", True)
        drawn = [llm.generate([p], [one])[0] for p, one in zip(PROMPTS, params, strict=True)]
    ahead, launch = [], StepGraphs.launch

    def watched(self: StepGraphs, schedule: Schedule, *given: object) -> Launched:
        ahead.append(bool(schedule.num_prefills and schedule.is_pending.any()))
        with waiting_is_an_error() if recorded else nullcontext():
            return launch(self, schedule, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(StepGraphs, "launch", watched)
    engine, found, count = llm.engine, {}, 0
    for turn in range(3):
        numbers: list[int] = []
        while engine.has_work or len(numbers) < len(PROMPTS):
            if len(numbers) < len(PROMPTS) and count % (3 + turn) == 0:
                number = len(numbers)
                numbers.append(engine.submit(PROMPTS[number], params[number]))
            for piece in engine.step():
                if piece.result is not None:
                    found[piece.number] = piece.result.token_ids
            engine.audit()
            count += 1
        for place, number in enumerate(numbers):
            wanted = drawn[place].token_ids if place % 2 else expected[place]
            assert found[number] == wanted, f"request {place} in turn {turn}"
    assert ahead.count(True) > (10 if memory == "64MiB" else 3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_families_run_on_a_gpu_as_on_a_cpu(family: str, tmp_path: Path) -> None:
    built = tiny.build(family, tmp_path)
    assert answers(built, "cuda") == answers(built, "cpu", attention_backend="reference")


def test_bfloat16_answers_start_like_float32_ones(path: Path) -> None:
    given: dict[str, Any] = {"max_model_len": 500, "max_num_seqs": 16, "kv_cache_memory": "64MiB"}
    llm = LLM(path, device="cuda", dtype="bfloat16", **given)
    full = LLM(path, device="cuda", dtype="float32", **given)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    for prompt in PROMPTS:
        a, b = llm.generate([prompt], params)[0], full.generate([prompt], params)[0]
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert abs(a.logprobs[0].logprob - b.logprobs[0].logprob) < 0.15
    torch.cuda.synchronize()


FORMATS = ("bfloat16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head",
           "int4_per_token_head", "nvfp4")  # fmt: skip


@pytest.mark.parametrize("stored", FORMATS)
def test_in_batch_invariant_mode_answers_have_the_same_bits_in_any_batch_and_any_chunks(
    path: Path, stored: str
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)

    def bits(tokens: int, *, together: bool) -> list[object]:
        llm = LLM(
            path, device="cuda", dtype="bfloat16", max_model_len=500, kv_cache_dtype=stored,
            batch_invariant=True, max_num_batched_tokens=tokens, kv_missing_scales="one",
            max_num_seqs=16, kv_cache_memory="64MiB",
        )  # fmt: skip
        if together:
            found = llm.generate(PROMPTS, params)
        else:
            found = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
        return [(result.token_ids, result.logprobs) for result in found]

    alone = bits(512, together=False)
    assert bits(512, together=True) == alone
    assert bits(67, together=True) == alone


@pytest.mark.case("A50")
@pytest.mark.parametrize("stored", ["float32", "fp8_per_token_head", "fp8_e4m3"])
def test_with_and_without_graphs_the_tokens_are_the_same(
    path: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batch-invariant mode, as the padding of a recorded step makes other shapes outside it."""
    from kvant.execution.runner import ModelRunner

    options = {"kv_cache_dtype": stored, "kv_missing_scales": "one", "batch_invariant": True}
    recorded = answers(path, "cuda", **options)
    monkeypatch.setattr(ModelRunner, "capture", lambda self, *_: None)
    assert answers(path, "cuda", **options) == recorded


@pytest.mark.case("A50")
def test_warm_up_graphs_and_the_check_at_start_leave_every_page_zero(path: Path) -> None:
    from kvant.execution.runner import ModelRunner

    llm = LLM(path, device="cuda", dtype="bfloat16", max_model_len=500, kv_cache_dtype="fp8/nvfp4",
              kv_missing_scales="one", kv_cache_memory="64MiB")  # fmt: skip
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.is_recorded
    assert all(not plane.view(torch.uint8).any() for plane in runner.pool.planes())
    llm.engine.audit()
    assert llm.engine.stats.num_held_pages == 0


@pytest.mark.case("A50")
def test_recorded_steps_read_scales_where_they_lie_on_the_device(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvant.execution.runner import ModelRunner

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)

    def before_and_after(*, recorded: bool) -> list[object]:
        llm = LLM(path, device="cuda", dtype="float32", max_model_len=500, kv_cache_dtype="fp8",
                  kv_missing_scales="one", batch_invariant=True, enable_prefix_caching=False,
                  kv_cache_memory="64MiB")  # fmt: skip
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        assert runner.is_recorded is recorded
        found: list[object] = [llm.generate([PROMPTS[1]], params)[0].logprobs]
        for layer in range(len(runner.pool.plan.layers)):
            scale = runner.pool[layer].v_scale
            assert scale is not None
            scale.fill_(2.0**-6)  # values saturate at 7
        return [*found, llm.generate([PROMPTS[1]], params)[0].logprobs]

    with_graphs = before_and_after(recorded=True)
    monkeypatch.setattr(ModelRunner, "capture", lambda self, *_: None)
    assert before_and_after(recorded=False) == with_graphs
    assert with_graphs[0] != with_graphs[1]


@pytest.mark.parametrize("dialect", [one for one in DIALECTS if "reordered" in one])
def test_reordered_inputs_give_the_answers_of_their_numbers(dialect: str, tmp_path: Path) -> None:
    """One row, few rows and a prompt, against the same numbers in bfloat16."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    stored, numbers = build(tmp_path / "stored", dialect, **sizes)
    wide = tiny.build("llama", tmp_path / "wide", **sizes)
    save_file(numbers, wide / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5)

    def given(path: Path, prompts: list[list[int]]) -> list[Any]:
        llm = LLM(path, device="cuda", dtype="bfloat16", max_num_seqs=16, kv_cache_memory="64MiB")
        return [result.logprobs for result in llm.generate(prompts, params)]

    for prompts in (PROMPTS[1:2], PROMPTS):
        for a, b in zip(given(stored, prompts), given(wide, prompts), strict=True):
            assert abs(a[0].logprob - b[0].logprob) < 0.15
