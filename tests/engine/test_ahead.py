"""Steps with pieces of prompts that are launched, and followed, before anything is read: the same answers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvant import LLM, SamplingParams
from kvant.engine.engine import Engine
from kvant.engine.result import Result
from kvant.execution.graphs import StepGraphs
from kvant.kv.pages import CacheIdentity
from kvant.plan.limits import Limits
from kvant.scheduling.request import FinishReason
from tests.engine.fakes import EOS, VOCAB, answer, finish, make_engine
from tests.engine.test_steady import (
    PAGE,
    Admissions,
    RecordedRunner,
    some_params,
    step_that_fails,
)  # fmt: skip
from tests.models import tiny
from tests.speculative.recorded import record


def make(
    num_pages: int, *, seqs: int = 6, tokens: int = 24, longest: int = 96, stride: int = 1
) -> tuple[Engine, RecordedRunner]:
    runner = RecordedRunner(num_pages, seqs, longest)
    limits = Limits(seqs, tokens, longest, PAGE, pages_ahead=True, prompt_stride=stride)
    identity = CacheIdentity("fake", None, "plan")
    engine = Engine(
        runner, limits, num_pages, identity=identity, vocab_size=VOCAB, eos_token_ids=(EOS,)
    )
    return engine, runner


def alone(prompt: list[int], params: SamplingParams) -> Result:
    """Step by step, each of which is read before the next begins."""
    engine, _ = make_engine()
    number = engine.submit(prompt, params)
    return finish(engine)[number]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Steps by how they came to run: "ahead" or "late" (everything before them was read), and `pieces`
    among either; and those launched in vain.
    """
    found: Counter[str] = Counter()
    launch, launch_pieces = StepGraphs._launch, StepGraphs._launch_pieces
    run, run_pieces = StepGraphs.run, StepGraphs.run_pieces
    late: list[str] = []

    def count(self: StepGraphs, step: Any, after: Any) -> Any:
        if after is None:
            late.append("decodes")
        return launch(self, step, after)

    def count_pieces(self: StepGraphs, step: Any, after: Any) -> Any:
        if after is None:
            late.append("pieces")
        return launch_pieces(self, step, after)

    def watched(of: Any, kind: str) -> Any:
        def go(self: StepGraphs, *given: Any) -> Any:
            had = self._guess is not None
            late.clear()
            logits = of(self, *given)
            found[f"{kind} {'late' if late else 'ahead'}"] += 1
            found["in vain"] += had and bool(late)
            return logits

        return go

    monkeypatch.setattr(StepGraphs, "_launch", count)
    monkeypatch.setattr(StepGraphs, "_launch_pieces", count_pieces)
    monkeypatch.setattr(StepGraphs, "run", watched(run, "decodes"))
    monkeypatch.setattr(StepGraphs, "run_pieces", watched(run_pieces, "pieces"))
    return found


@pytest.mark.parametrize("num_pages", [26, 40, 200], ids=["dry", "short", "ample"])
@pytest.mark.parametrize(("seed", "tokens", "stride"), [(0, 24, 1), (1, 11, 4), (2, 70, 8)])
def test_answers_are_those_of_each_request_alone(
    seed: int, tokens: int, stride: int, num_pages: int, steps: Counter[str]
) -> None:
    """Many arrive while others answer, with prompts cut into pieces, common beginnings, drawn tokens, stop
    tokens; some are cancelled, also between the launch of a step and its turn, some are preempted.
    """
    numbers = random.Random(seed)
    engine, _ = make(num_pages, tokens=tokens, stride=stride)
    asked: dict[int, tuple[list[int], SamplingParams]] = {}
    results: dict[int, Result] = {}
    common = [numbers.randrange(4, VOCAB) for _ in range(40)]
    left = 70
    while left or engine.has_work:
        if left and (not engine.has_work or numbers.random() < 0.3):
            for _ in range(min(left, numbers.choice((1, 1, 1, 2, 4)))):
                prompt = common[: numbers.choice((0, 0, 8, 13, 40))]
                prompt = prompt + [
                    numbers.randrange(4, VOCAB) for _ in range(numbers.choice((1, 4, 7, 24)))
                ]
                params = some_params(numbers)
                asked[engine.submit(prompt, params)] = prompt, params
                left -= 1
        for _ in range(2):
            if numbers.random() < 0.04 and engine.has_work:
                engine.cancel(numbers.choice(sorted(engine.numbers)))
        for piece in engine.step():
            if piece.result is not None:
                results[piece.number] = piece.result
        engine.audit()
    assert steps["pieces ahead"] > 8
    assert steps["decodes ahead"] > 30
    assert steps["pieces late"] > 0
    assert num_pages > 26 or engine.stats.num_preemptions > 0
    assert len(results) > 40
    for number, result in results.items():
        prompt, params = asked[number]
        expected = alone(prompt, params)
        assert list(result.token_ids) == list(expected.token_ids)
        assert result.finish_reason is expected.finish_reason


def test_while_requests_only_arrive_no_step_waits_for_the_one_before_to_be_read(
    steps: Counter[str],
) -> None:
    engine, runner = make(300, seqs=12)
    runner.forgets = False
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    wanted: dict[int, list[int]] = {}
    for count in range(30):
        if count % 3 == 0:
            prompt = [5 + (7 * i + count) % 90 for i in range(2 + 5 * (count // 3))]
            wanted[engine.submit(prompt, params)] = answer(prompt, 40)
        for piece in engine.step():
            expected = wanted[piece.number]
            assert expected[: len(piece.token_ids)] == list(piece.token_ids)
            del expected[: len(piece.token_ids)]
        engine.audit()
    assert steps["pieces late"] == 1, "the first of all"
    assert steps["decodes late"] == 0
    assert steps["in vain"] == 0
    assert steps["pieces ahead"] > 10


def test_whoever_ends_is_left_out_of_the_step_that_runs_already(steps: Counter[str]) -> None:
    engine, _ = make(300)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = [5, 6, 7]
    tokens = answer(prompt, 40)
    ended = engine.submit(prompt, replace(params, stop_token_ids=[tokens[3]]))
    others = [engine.submit([8, 9], params), engine.submit([10], params)]
    for _ in range(3):
        engine.step()
    late = engine.submit([11] * 50, params)
    engine.step()  # the fourth token, and the first piece is launched behind it
    assert ended not in engine.numbers
    engine.cancel(others[0])
    results = finish(engine)
    assert list(results[others[1]].token_ids) == answer([10], 40)
    assert list(results[late].token_ids) == answer([11] * 50, 40)
    assert steps["pieces late"] == 1
    assert steps["in vain"] == 0


def test_a_request_that_is_cancelled_before_its_prompt_has_run_leaves_the_others_their_step() -> (
    None
):
    engine, _ = make(300)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    stays = engine.submit([5, 6, 7], params)
    for _ in range(3):
        engine.step()
    gone = engine.submit([11] * 30, params)
    told = [token for piece in engine.step() for token in piece.token_ids]
    engine.cancel(gone)
    engine.audit()
    again = engine.submit([11] * 30, params)  # may get the pages that are being written
    results = finish(engine)
    assert told == answer([5, 6, 7], 4)[3:]
    assert list(results[stays].token_ids) == answer([5, 6, 7], 12)
    assert list(results[again].token_ids) == answer([11] * 30, 12)


def test_a_prompt_that_was_launched_behind_a_step_that_failed_is_computed_as_it_is_scheduled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = make(300)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for prompt in ([5, 6], [7], [8, 9]):
        engine.submit(prompt, params)
    for _ in range(3):
        engine.step()
    late = engine.submit([11] * 50, params)

    step_that_fails(engine, runner, monkeypatch)
    assert engine.numbers == {late}, "its piece had 21 tokens, and now there is room for 24"
    tokens = [token for _ in range(14) for piece in engine.step() for token in piece.token_ids]
    assert tokens == answer([11] * 50, 12)


def test_a_prompt_waits_for_pages_that_a_step_behind_computes(steps: Counter[str]) -> None:
    engine, _ = make(300, tokens=70)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.submit([5, 6], params)
    for _ in range(3):
        engine.step()
    prompt = list(range(10, 50))
    numbers = []
    for _ in range(2):
        numbers.append(engine.submit(prompt, params))
        engine.step()
    results = finish(engine)
    assert [results[number].num_cached_tokens for number in numbers] == [0, 36]
    assert [list(results[number].token_ids) for number in numbers] == [answer(prompt, 12)] * 2
    assert steps["in vain"] == 0


@pytest.mark.parametrize(
    "prompts",
    [[[5] * 23, [6] * 10], [[5] * 17, [6] * 10], [list(range(10, 30)), list(range(10, 31))]],
    ids=["no room", "room for too little", "shared"],
)
def test_whoever_waits_only_for_the_step_that_runs_is_begun_in_the_next(
    prompts: list[list[int]], steps: Counter[str]
) -> None:
    engine, _ = make(300, stride=8)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    first = engine.submit([5, 6, 7], params)
    for _ in range(3):
        engine.step()
    one, other = (engine.submit(prompt, params) for prompt in prompts)
    told = [{piece.number for piece in engine.step()} for _ in range(3)]
    assert told == [{first}, {first, one}, {first, one, other}]
    assert steps["in vain"] == 0


@pytest.mark.parametrize("num_pages", [26, 200], ids=["dry", "ample"])
@pytest.mark.parametrize("seed", range(2))
def test_whoever_there_is_room_for_waits_for_one_step_at_most(
    seed: int, num_pages: int, steps: Counter[str]
) -> None:
    numbers = random.Random(seed)
    engine, _ = make(num_pages)
    admissions, left = Admissions(), 40
    while left or engine.has_work:
        if left and (not engine.has_work or numbers.random() < 0.3):
            prompt = [numbers.randrange(4, 8) for _ in range(numbers.choice((2, 9, 24, 50)))]
            engine.submit(prompt, some_params(numbers))
            left -= 1
        if numbers.random() < 0.03 and engine.has_work:
            engine.cancel(numbers.choice(sorted(engine.numbers)))
        admissions.step(engine)
        engine.audit()
    assert admissions.most <= 1
    assert steps["pieces ahead"] > 4


def test_no_step_is_launched_behind_prompts_without_answers(steps: Counter[str]) -> None:
    engine, _ = make(300)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for count in range(12):
        engine.submit([5 + count] * 9, params)
        while engine.has_work and count > 5:
            engine.step()
    assert steps["pieces ahead"] == 2
    assert sum(steps.values()) == engine.stats.num_steps, "nothing in vain"


def test_logits_that_are_no_numbers_end_only_their_own_request_behind_which_a_prompt_runs() -> None:
    engine, runner = make(300)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    broken, sound = (engine.submit(prompt, params) for prompt in ([5, 6, 7], [8, 9]))
    runner.poison = lambda context: context == [5, 6, 7, *answer([5, 6, 7], 5)]
    for _ in range(5):
        engine.step()
    late = engine.submit([5, 6, 7, 9, 9, 9], params)
    results = finish(engine)
    assert results[broken].finish_reason is FinishReason.NUMERICAL_ERROR
    assert list(results[broken].token_ids) == answer([5, 6, 7], 5)
    assert list(results[sound].token_ids) == answer([8, 9], 20)
    assert list(results[late].token_ids) == answer([5, 6, 7, 9, 9, 9], 20)


@pytest.mark.parametrize(
    ("stored", "memory"),
    [("float32", "420KB"), ("float32", "4MB"), ("nvfp4", "65KB"), ("nvfp4", "4MB")],
)
def test_a_model_answers_arriving_requests_as_without_recorded_steps(
    stored: str, memory: str, tmp_path: Path, steps: Counter[str]
) -> None:
    path = tiny.build("qwen3", tmp_path)

    def answers(*, recorded: bool) -> dict[int, tuple[int, ...]]:
        numbers = random.Random(3)
        llm = LLM(
            path, device="cpu", dtype="float64", max_model_len=128, max_num_seqs=4, page_size=16,
            max_num_batched_tokens=48, kv_cache_dtype=stored, kv_cache_memory=memory,
            attention_backend="reference",
        )  # fmt: skip
        if recorded:
            record(llm)
        engine, found, left = llm.engine, {}, 16
        while left or engine.has_work:
            if left and (not engine.has_work or numbers.random() < 0.3):
                prompt = [numbers.randrange(3, 110) for _ in range(numbers.choice((3, 20, 75)))]
                heat, tokens = numbers.choice((0.0, 0.0, 1.0)), numbers.choice((2, 9, 20))
                params = SamplingParams(temperature=heat, seed=left, max_tokens=tokens)
                engine.submit(prompt, params)
                left -= 1
            for piece in engine.step():
                if piece.result is not None:
                    found[piece.number] = piece.result.token_ids
            engine.audit()
        return found

    wanted = answers(recorded=False)
    assert not steps
    assert answers(recorded=True) == wanted
    assert steps["pieces ahead"] > 5
    assert len(wanted) == 16
