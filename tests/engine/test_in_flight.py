"""One step is in flight: the next one is launched before the host reads it. No answer changes by that.

The host learns one step late which requests have ended, so these tests let requests arrive, end, fail, be
cancelled and lose their pages at every moment. Each answer must be the one that the request gets alone,
in steps that are read one by one. The fake model reads back what it stored in pages, so a token in
the wrong row, page or slot gives another answer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from kvant import LLM
from kvant.attention.base import Step
from kvant.engine.engine import Engine
from kvant.engine.requests import LiveRequests
from kvant.engine.result import Result
from kvant.engine.text import TextStream
from kvant.execution.batch import Drafts, Launched
from kvant.execution.graphs import StepGraphs
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule, Scheduler
from tests.engine.fakes import EOS, VOCAB, answer, finish
from tests.engine.in_flight import (
    PAGE,
    SHORT,
    Admissions,
    alone,
    make,
    some_params,
    step_that_fails,
)
from tests.models import tiny
from tests.speculative.recorded import Again, record


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **more}, max_tokens=max_tokens)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Steps by how they were launched: `ahead` of reading the step before, or with everything `read`.

    `pieces ahead`, `drafts ahead`, `drawn`: those launched ahead with pieces of prompts, with drafts,
    with sampled tokens. `uncertain`: with drafts in flight that were not verified yet. `plain`: steps
    whose requests all got a token and nothing else happened; `most plain`: requests of the largest.
    `waited`: schedules that needed the step in flight to be read first, for its pages. `overlapping`:
    schedules behind a step in flight.
    """
    found: Counter[str] = Counter()
    launch, commit, schedule_ = StepGraphs.launch, LiveRequests._commit_plain, Scheduler.schedule

    def count(
        graphs: StepGraphs,
        schedule: Schedule,
        table: RowTable,
        drafts: Drafts | None,
        cleared: Sequence[Sequence[int]] = (),
    ) -> Launched:
        is_ahead = bool(schedule.is_pending.any())
        found["ahead" if is_ahead else "read"] += 1
        found["pieces ahead"] += is_ahead and schedule.num_prefills > 0
        found["drafts ahead"] += is_ahead and schedule.max_drafts is not None
        found["uncertain"] += schedule.limits is not None
        found["drawn"] += is_ahead and not table.is_greedy[schedule.rows].all()
        return launch(graphs, schedule, table, drafts, cleared)

    def count_plain(lives: LiveRequests, *given: Any) -> Any:
        progress = commit(lives, *given)
        if progress is not None:
            found["plain"] += 1
            found["most plain"] = max(found["most plain"], len(progress))
        return progress

    def count_waits(scheduler: Scheduler, *given: Any) -> Schedule | None:
        schedule = schedule_(scheduler, *given)
        found["waited"] += schedule is None
        found["overlapping"] += len(scheduler._in_flight) > 1
        return schedule

    monkeypatch.setattr(StepGraphs, "launch", count)
    monkeypatch.setattr(LiveRequests, "_commit_plain", count_plain)
    monkeypatch.setattr(Scheduler, "schedule", count_waits)
    return found


# -- any mixture of requests ---------------------------------------------------------------------


@pytest.mark.parametrize("num_pages", [16, 30, 200], ids=["dry", "short", "ample"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_answers_are_those_of_each_request_alone(
    seed: int, num_pages: int, launches: Counter[str]
) -> None:
    """Greedy and sampled requests, ends of every kind, cancelled requests, some that need the host."""
    numbers = random.Random(seed)
    engine, _ = make(num_pages)
    asked: dict[int, tuple[list[int], SamplingParams]] = {}
    results: dict[int, Result] = {}
    streamed: dict[int, list[int]] = {}
    common = [numbers.randrange(4, VOCAB) for _ in range(12)]
    left = 80
    while left or engine.has_work:
        if left and (not engine.has_work or numbers.random() < 0.08):
            for _ in range(min(left, numbers.randint(1, 4))):
                prompt = common[: numbers.choice((0, 9, 12))]
                prompt = prompt + [
                    numbers.randrange(4, VOCAB) for _ in range(numbers.randint(1, 9))
                ]
                params = some_params(numbers)
                asked[engine.submit(prompt, params)] = prompt, params
                left -= 1
        if numbers.random() < 0.02 and engine.has_work:
            engine.cancel(numbers.choice(sorted(engine.numbers)))
        for piece in engine.step():
            streamed.setdefault(piece.number, []).extend(piece.token_ids)
            if piece.result is not None:
                results[piece.number] = piece.result
        engine.audit()
    assert launches["plain"] > 15
    assert launches["most plain"] >= 2
    assert num_pages > 16 or engine.stats.num_preemptions > 0
    assert len(results) > 60
    for number, result in results.items():
        prompt, params = asked[number]
        expected = alone(prompt, params)
        assert list(result.token_ids) == list(expected.token_ids) == streamed.get(number, [])
        assert result.finish_reason is expected.finish_reason
        assert result.logprobs == expected.logprobs
        assert result.prompt_logprobs == expected.prompt_logprobs
        if params.is_greedy and not params.presence_penalty and not params.min_tokens:
            assert params.max_tokens is not None
            eos = None if params.ignore_eos else EOS
            assert list(result.token_ids) == answer(prompt, params.max_tokens, eos=eos)
    assert launches["drawn"] > (5 if num_pages == 16 else 60)


@pytest.mark.parametrize(
    ("num_pages", "mixed"),
    [
        pytest.param(26, 0, id="dry-prompts one by one"),
        pytest.param(26, 24, id="dry-prompts recorded"),
        pytest.param(40, 24, id="short-prompts recorded"),
        pytest.param(200, 0, id="ample-prompts one by one"),
        pytest.param(40, 0, id="short-prompts one by one", marks=pytest.mark.slow),
        pytest.param(200, 24, id="ample-prompts recorded", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("seed", "tokens", "stride"), [(0, 24, 1), (1, 11, 4), (2, 70, 8)])
def test_answers_are_the_same_while_prompts_run_in_pieces(
    seed: int, tokens: int, stride: int, num_pages: int, mixed: int, launches: Counter[str]
) -> None:
    """Many arrive while others answer; prompts are cut and share beginnings; some are preempted."""
    numbers = random.Random(seed)
    engine, _ = make(num_pages, tokens=tokens, stride=stride, longest=96, mixed=mixed)
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
    assert launches["pieces ahead"] > 8
    assert launches["ahead"] - launches["pieces ahead"] > 30
    assert num_pages > 26 or engine.stats.num_preemptions > 0
    assert len(results) > 40
    for number, result in results.items():
        prompt, params = asked[number]
        expected = alone(prompt, params)
        assert list(result.token_ids) == list(expected.token_ids)
        assert result.finish_reason is expected.finish_reason


@pytest.mark.parametrize(
    ("stored", "memory"),
    [("float32", "420KB"), ("float32", "4MB"), ("nvfp4", "65KB"), ("nvfp4", "4MB")],
)
def test_a_model_answers_arriving_requests_as_without_recorded_steps(
    stored: str, memory: str, tmp_path: Path, launches: Counter[str]
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
    assert not launches["ahead"]
    assert answers(recorded=True) == wanted
    assert launches["pieces ahead"] > 5
    assert len(wanted) == 16


# -- text ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """Letters, some words, and the bytes of longer characters one by one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {f"<{token}>": token for token in range(4)}
    for letter in [*"abcdefghij", *(letter for letter in letters if ord(letter) > 0xA0)]:
        if len(vocab) < VOCAB:
            vocab[letter] = len(vocab)
    assert len(vocab) == VOCAB
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{token}>" for token in range(4)])
    return tokenizer


@dataclass(frozen=True)
class Want:
    """A request: what it asks, and after which number of steps it comes and is cancelled."""

    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    comes: int
    cancelled: int | None


_wants = st.builds(
    Want,
    st.lists(st.integers(4, VOCAB - 1), min_size=1, max_size=9).map(tuple),
    st.integers(1, 24),
    st.booleans(),
    st.sampled_from([(), (), (), ("a",), ("bc", "d")]),
    st.integers(0, 30),
    st.none() | st.integers(1, 40),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wants=st.lists(_wants, min_size=1, max_size=7), num_pages=st.sampled_from([16, 24, 100]))
def test_text_is_that_of_each_request_alone(
    words: Tokenizer, wants: list[Want], num_pages: int
) -> None:
    """Requests come, end, are cancelled and preempted meanwhile; some have stop strings, which end them."""
    engine, _ = make(num_pages, tokenizer=words)
    numbers: dict[int, Want] = {}
    results: dict[int, Result] = {}
    shown: dict[int, str] = {}
    count = 0
    while engine.has_work or count <= max(want.comes for want in wants):
        for want in wants:
            if want.comes == count:
                params = greedy(want.max_tokens, ignore_eos=want.ignore_eos, stop=want.stop)
                numbers[engine.submit(want.prompt, params)] = want
        for number, want in numbers.items():
            if want.cancelled is not None and want.comes + want.cancelled == count:
                result = engine.cancel(number)
                if result is not None:
                    results[number] = result
        for piece in engine.step():
            shown[piece.number] = shown.get(piece.number, "") + piece.text
            if piece.result is not None:
                results[piece.number] = piece.result
        engine.audit()
        count += 1
    assert len(results) == len(wants)
    for number, want in numbers.items():
        result = results[number]
        text = TextStream(words, want.prompt, skip_special_tokens=True, stops=want.stop)
        tokens = []
        pieces = ""
        ends = None if want.ignore_eos else EOS
        for token in answer(want.prompt, want.max_tokens, eos=ends):
            if result.finish_reason is FinishReason.CANCELLED and len(tokens) == len(
                result.token_ids
            ):
                break
            tokens.append(token)
            if token != ends:
                pieces += text.push(token)
            if text.stopped_by is not None:
                break
        assert list(result.token_ids) == tokens
        whole = pieces + text.finish()
        assert result.text == whole
        is_cancelled = result.finish_reason is FinishReason.CANCELLED
        assert shown.get(number, "") == (pieces if is_cancelled else whole)
        assert result.stop_reason == text.stopped_by


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["text alone", "a stop string"])
def test_requests_with_text_are_committed_together_unless_their_text_may_end_them(
    words: Tokenizer, launches: Counter[str], stop: tuple[str, ...]
) -> None:
    engine, _ = make(100, tokenizer=words)
    for prompt in ([5, 6, 7], [8, 9]):
        engine.submit(prompt, greedy(20))
    engine.submit([4], greedy(20, stop=stop))
    finish(engine)
    assert launches["plain"] == (0 if stop else 18), "all but the first and the last"


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_steps_whose_text_is_streamed_or_searched_for_stop_strings_are_launched_ahead(
    words: Tokenizer, heat: float, launches: Counter[str]
) -> None:
    params = SamplingParams(temperature=heat, seed=5, max_tokens=40, ignore_eos=True)
    free = alone([5, 6, 7], params)
    tokens = [token for token in free.token_ids[8:20] if 4 <= token < 14]
    ended = replace(params, stop=words.id_to_token(tokens[0]))
    engine, _ = make(200, tokenizer=words)
    numbers = [engine.submit([5, 6, 7], one) for one in (params, ended, params)]
    streamed = [piece for piece in engine.stream(numbers[2]) for piece in piece.token_ids]
    assert streamed == list(free.token_ids)
    assert (launches["ahead"], launches["read"]) == (39, 1), "what ended was only left out"
    assert launches["drawn"] == (39 if heat else 0)


# -- when steps are launched ---------------------------------------------------------------------


def test_a_request_that_arrives_does_not_discard_the_step_in_flight(launches: Counter[str]) -> None:
    """The step in flight gives its tokens; the prompt runs in the step behind it."""
    engine, _ = make(200)
    told: list[int] = []
    for _ in range(3):
        engine.submit([5, 6, 7], greedy(40))
        for _ in range(5):
            told.append(len([piece for piece in engine.step() if piece.token_ids]))
    # The first step only launches. From the second request on, its prompt is launched behind a step.
    assert told == [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3]
    finish(engine)
    assert launches["read"] == 1
    assert launches["ahead"] + 1 == engine.stats.num_steps, "no step is launched in vain"


def test_while_requests_only_arrive_no_step_waits_for_the_one_before_to_be_read(
    launches: Counter[str],
) -> None:
    engine, _ = make(300, seqs=12, tokens=24, longest=96)
    wanted: dict[int, list[int]] = {}
    for count in range(30):
        if count % 3 == 0:
            prompt = [5 + (7 * i + count) % 90 for i in range(2 + 5 * (count // 3))]
            wanted[engine.submit(prompt, greedy(40))] = answer(prompt, 40)
        for piece in engine.step():
            expected = wanted[piece.number]
            assert expected[: len(piece.token_ids)] == list(piece.token_ids)
            del expected[: len(piece.token_ids)]
        engine.audit()
    assert launches["read"] == 1, "the first of all"
    assert launches["pieces ahead"] > 10
    assert sum(launches[how] for how in ("read", "ahead")) == engine.stats.num_steps + 1


def test_steps_are_launched_ahead_while_waiting_requests_have_no_room(
    launches: Counter[str],
) -> None:
    engine, _ = make(200, seqs=2)
    for _ in range(6):
        engine.submit([5, 6, 7], greedy(20))
    finish(engine)
    assert launches["plain"] == 3 * 18
    assert launches["read"] == 3, "only the prompts, when nothing else runs"


def test_a_request_that_ends_by_max_tokens_is_not_scheduled_again(launches: Counter[str]) -> None:
    """The scheduler knows before the last token is read that it is the last one."""
    engine, _ = make(300)
    scheduled: Counter[int] = Counter()
    launch = engine.runner.launch

    def count(schedule: Schedule, *given: Any) -> Launched:
        scheduled.update(schedule.numbers.tolist())
        return launch(schedule, *given)

    engine.runner.launch = count  # type: ignore[method-assign]
    wanted = {}
    for tokens in (1, 2, 3, 7, 20, 1, 2, 5, 1, 9):
        wanted[engine.submit([5 + tokens] * 9, greedy(tokens))] = tokens
        for _ in range(tokens % 3):
            engine.step()
    results = finish(engine)
    assert {number: len(results[number].token_ids) for number in results} | wanted == wanted
    assert scheduled == wanted, "one step per token: the first one runs the prompt"
    assert launches["read"] + launches["ahead"] == engine.stats.num_steps


def test_no_step_is_launched_behind_prompts_without_answers(launches: Counter[str]) -> None:
    engine, _ = make(300, tokens=24)
    for count in range(12):
        engine.submit([5 + count] * 9, greedy(1))
        while engine.has_work and count > 5:
            engine.step()
    assert launches["overlapping"] >= 2
    assert launches["read"] + launches["ahead"] == engine.stats.num_steps, "nothing in vain"


def test_a_prompt_waits_for_pages_that_the_step_in_flight_computes() -> None:
    engine, _ = make(300, tokens=70, longest=96)
    engine.submit([5, 6], greedy(12))
    for _ in range(3):
        engine.step()
    prompt = list(range(10, 50))
    numbers = []
    for _ in range(2):
        numbers.append(engine.submit(prompt, greedy(12)))
        engine.step()
    results = finish(engine)
    assert [results[number].num_cached_tokens for number in numbers] == [0, 36]
    assert [list(results[number].token_ids) for number in numbers] == [answer(prompt, 12)] * 2


@pytest.mark.parametrize(
    "prompts",
    [[[5] * 23, [6] * 10], [[5] * 17, [6] * 10], [list(range(10, 30)), list(range(10, 31))]],
    ids=["no room", "room for too little", "shared"],
)
def test_a_request_that_waits_only_for_the_step_in_flight_runs_in_one_of_the_next_two(
    prompts: list[list[int]], launches: Counter[str]
) -> None:
    engine, _ = make(300, tokens=24, stride=8, longest=96)
    first = engine.submit([5, 6, 7], greedy(12))
    for _ in range(3):
        engine.step()
    one, other = (engine.submit(prompt, greedy(12)) for prompt in prompts)
    told = [{piece.number for piece in engine.step()} for _ in range(4)]
    assert told[:2] == [{first}, {first, one}]
    assert other in told[2] | told[3]
    assert launches["read"] == 1


@pytest.mark.parametrize("num_pages", [16, 24, 200], ids=["dry", "short", "ample"])
@pytest.mark.parametrize("seed", range(3))
def test_a_request_that_there_is_room_for_waits_for_one_step_at_most(
    seed: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind steps that fail, streams that begin or are dropped, requests that are cancelled."""
    numbers = random.Random(seed)
    engine, runner = make(num_pages)
    launch = runner.launch

    def failing(*given: Any) -> Launched:
        if numbers.random() < 0.01:
            raise RuntimeError("the device is gone")
        launched = launch(*given)

        def read() -> Any:
            if numbers.random() < 0.01:
                raise RuntimeError("the device is gone")
            return launched.read()

        return replace(launched, read=read)

    monkeypatch.setattr(runner, "launch", failing)
    admissions = Admissions()
    left, streams, failures = 60, [], 0
    while left or engine.has_work:
        if left and (not engine.has_work or numbers.random() < 0.15):
            for _ in range(min(left, numbers.choice((1, 1, 2, 5)))):
                prompt = [numbers.randrange(4, 8) for _ in range(numbers.choice((1, 2, 9, 20)))]
                number = engine.submit(prompt, some_params(numbers))
                left -= 1
                if numbers.random() < 0.1:
                    streams.append(engine.stream(number))
        if numbers.random() < 0.02:
            streams.clear()  # they are dropped: their requests are cancelled
        if numbers.random() < 0.03 and engine.has_work:
            engine.cancel(numbers.choice(sorted(engine.numbers)))
        failures += 1
        with suppress(RuntimeError):
            admissions.step(engine)
            failures -= 1
        engine.audit()
    assert admissions.most <= 1
    assert admissions.num_begun > 30
    assert failures > 0


@pytest.mark.parametrize("num_pages", [26, 200], ids=["dry", "ample"])
@pytest.mark.parametrize("seed", range(2))
def test_without_failures_it_is_admitted_by_the_next_step(
    seed: int, num_pages: int, launches: Counter[str]
) -> None:
    numbers = random.Random(seed)
    engine, _ = make(num_pages, tokens=24, longest=96)
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
    assert admissions.most == 0
    assert admissions.num_begun > 20
    assert launches["pieces ahead"] > 4


@pytest.mark.parametrize("num_pages", [16, 200], ids=["dry", "ample"])
def test_steps_that_are_committed_together_launch_what_steps_committed_one_by_one_launch(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*, together: bool) -> list[object]:
        numbers = random.Random(7)
        engine, runner = make(num_pages)
        calls: list[object] = []
        launch, zero = runner.launch, runner.zero

        def note_launch(
            schedule: Schedule, table: RowTable, drafts: Drafts | None = None
        ) -> Launched:
            arrays = (
                schedule.rows, schedule.numbers, schedule.starts, schedule.counts, schedule.samples,
                schedule.is_pending, table.pages[schedule.rows],
            )  # fmt: skip
            values = [array.tolist() for array in arrays]
            tokens = [sequence.token_ids[-1] for sequence in schedule.sequences]
            calls.append(("launch", tokens, *values, schedule.needs_host))
            return launch(schedule, table, drafts)

        def note_zero(pages: Sequence[int]) -> None:
            calls.append(("zero", list(pages)))
            zero(pages)

        with monkeypatch.context() as noted:
            noted.setattr(runner, "launch", note_launch)
            noted.setattr(runner, "zero", note_zero)
            if not together:
                noted.setattr(LiveRequests, "_commit_plain", lambda *given: None)
            for _ in range(12):
                for _ in range(numbers.randint(0, 3)):
                    prompt = [numbers.randrange(4, VOCAB) for _ in range(numbers.randint(1, 20))]
                    tokens, heat = numbers.randint(1, 40), numbers.choice((0.0, 1.0))
                    engine.submit(
                        prompt, SamplingParams(temperature=heat, max_tokens=tokens, seed=1)
                    )
                for _ in range(numbers.randint(1, 20)):
                    calls.append([piece[:3] for piece in engine.step()])
            while engine.has_work:
                calls.append([piece[:3] for piece in engine.step()])
        return calls

    found = asked(together=True)
    assert len(found) > 100
    assert found == asked(together=False)


def test_counts_and_cached_pages_are_those_of_other_steps(launches: Counter[str]) -> None:
    engine, _ = make(60)
    first = engine.submit([5, 6, 7], greedy(20))
    results = finish(engine)
    assert launches["plain"] >= 15
    stats = engine.stats
    assert (stats.num_steps, stats.num_computed_tokens) == (20, 3 + 19)
    known = [5, 6, 7, *results[first].token_ids]
    again = engine.submit(known, greedy(1))
    assert finish(engine)[again].num_cached_tokens == 20, "pages that answers filled are found"


def test_logits_of_all_recorded_steps_lie_in_one_place() -> None:
    def forward(ids: Tensor, step: Step, index: Tensor) -> Tensor:
        return torch.ones(len(index), 7, dtype=torch.bfloat16)

    graphs = StepGraphs(
        forward, 20, max_num_batched_tokens=40, page_size=PAGE, max_model_len=64,
        device=torch.device("cpu"), recorder=Again(), run=lambda batch, ids: torch.empty(0),
        draft=lambda tokens, _: tokens.clamp(min=0), num_drafts=[3],
    )  # fmt: skip
    graphs.capture()
    recorded = [*graphs._decodes.values(), *graphs._choosers.values()]
    made = [graph.logits for graph in recorded]
    assert {len(logits) for logits in made} >= {1, 4, 16, 20, 80}
    assert {logits.data_ptr() for logits in made} == {made[0].data_ptr()}
    assert {logits.dtype for logits in made} == {torch.float32}
    assert graphs.logits.rows(1).data_ptr() == made[0].data_ptr(), "where mixed steps leave theirs"


def test_steps_of_few_short_contexts_run_as_such() -> None:
    engine, runner = make(200, seqs=6, longest=60)
    engine.submit([5, 6, 7], greedy(40))
    finish(engine)
    steps = SHORT.tokens - 3, 3 + 40 - SHORT.tokens - 1
    assert runner.longest == {SHORT.tokens: steps[0], 60: steps[1]}
    for _ in range(SHORT.seqs + 1):
        engine.submit([5, 6, 7], greedy(8))
    before = runner.longest[SHORT.tokens]
    for _ in range(3):
        engine.step()
    assert runner.longest[SHORT.tokens] == before


# -- what happens while a step is in flight ------------------------------------------------------


def in_flight(engine: Engine) -> list[int]:
    """Numbers of the sequences of the step that was launched and not read."""
    assert engine._in_flight is not None
    numbers: list[int] = engine._in_flight[0].schedule.numbers.tolist()
    return numbers


def test_a_request_that_is_cancelled_in_flight_gets_no_token_more_and_its_pages_are_free() -> None:
    engine, _runner = make(20)
    cancelled, stays = (engine.submit(prompt, greedy(30)) for prompt in ([5, 6, 7], [8, 9]))
    for _ in range(6):
        engine.step()
    assert in_flight(engine) == [cancelled, stays]
    held = engine.stats.num_held_pages
    result = engine.cancel(cancelled)
    assert result is not None
    assert list(result.token_ids) == answer([5, 6, 7], 5)
    engine.audit()
    assert engine.stats.num_held_pages == held - result.num_pages
    # These need every page that is free, so pages that the step in flight writes are among theirs.
    others = [engine.submit([11 + i] * 20, greedy(8)) for i in range(2)]
    seen: set[int] = set()
    results = {}
    while engine.has_work:
        for piece in engine.step():
            seen.add(piece.number)
            if piece.result is not None:
                results[piece.number] = piece.result
        engine.audit()
    assert cancelled not in seen
    assert list(results[stays].token_ids) == answer([8, 9], 30)
    for i, number in enumerate(others):
        assert list(results[number].token_ids) == answer([11 + i] * 20, 8)


def test_a_row_that_gets_a_new_owner_in_flight_gives_it_no_token_of_the_old_one() -> None:
    engine, _ = make(60, seqs=2)
    old, stays = (engine.submit(prompt, greedy(30)) for prompt in ([5, 6, 7], [8, 9]))
    for _ in range(4):
        engine.step()
    rows = {s.number: s.row for s in engine.scheduler.sequences()}
    assert in_flight(engine) == [old, stays]
    engine.cancel(old)
    new = engine.submit([10, 11], greedy(9))
    pieces = engine.step()  # launches the new request's prompt, then reads the old one's step
    assert {s.number: s.row for s in engine.scheduler.sequences()} == {
        stays: rows[stays], new: rows[old],
    }  # fmt: skip
    assert [piece.number for piece in pieces] == [stays]
    engine.audit()
    results = finish(engine)
    assert list(results[new].token_ids) == answer([10, 11], 9)
    assert list(results[stays].token_ids) == answer([8, 9], 30)


def test_a_row_that_is_free_in_flight_is_reused_when_its_owner_stops() -> None:
    """A stop token is found while the next step with the stopped sequence is in flight."""
    engine, _runner = make(60, seqs=1)
    tokens = answer([5, 6, 7], 30)
    stopped = engine.submit([5, 6, 7], greedy(30, stop_token_ids=[tokens[6]]))
    last = next(i for i, token in enumerate(tokens) if token == tokens[6])
    waits = engine.submit([8, 9, 10, 11, 12], greedy(9))
    results = {}
    while stopped not in results:
        for piece in engine.step():
            if piece.result is not None:
                results[piece.number] = piece.result
    assert in_flight(engine) == [stopped], "a step behind its end"
    assert list(results[stopped].token_ids) == tokens[: last + 1]
    results |= finish(engine)
    assert list(results[waits].token_ids) == answer([8, 9, 10, 11, 12], 9)


def test_a_request_that_ends_is_left_out_of_the_step_in_flight(launches: Counter[str]) -> None:
    engine, _ = make(300, tokens=24, longest=96)
    prompt = [5, 6, 7]
    tokens = answer(prompt, 40)
    ended = engine.submit(prompt, greedy(40, stop_token_ids=[tokens[3]]))
    others = [engine.submit([8, 9], greedy(40)), engine.submit([10], greedy(40))]
    for _ in range(4):
        engine.step()
    late = engine.submit([11] * 50, greedy(40))
    engine.step()  # reads the fourth token; the first piece of the prompt was launched behind it
    assert ended not in engine.numbers
    engine.cancel(others[0])
    results = finish(engine)
    assert list(results[others[1]].token_ids) == answer([10], 40)
    assert list(results[late].token_ids) == answer([11] * 50, 40)
    assert launches["read"] == 1


def test_a_request_that_is_cancelled_while_its_prompt_is_in_flight_leaves_others_their_step() -> (
    None
):
    engine, _ = make(300, tokens=24, longest=96)
    stays = engine.submit([5, 6, 7], greedy(12))
    for _ in range(4):
        engine.step()
    gone = engine.submit([11] * 30, greedy(12))
    told = [token for piece in engine.step() for token in piece.token_ids]
    assert in_flight(engine) == [stays, gone]
    engine.cancel(gone)
    engine.audit()
    again = engine.submit([11] * 30, greedy(12))  # may get the pages that are being written
    results = finish(engine)
    assert told == answer([5, 6, 7], 4)[3:]
    assert list(results[stays].token_ids) == answer([5, 6, 7], 12)
    assert list(results[again].token_ids) == answer([11] * 30, 12)


@pytest.mark.parametrize("begins", [False, True], ids=["alone", "a prompt arrives"])
def test_logits_that_are_not_finite_end_only_their_own_request(
    begins: bool, launches: Counter[str]
) -> None:
    """The step behind is in flight with the broken sequence in it, and what it finds is dropped."""
    engine, runner = make(60, longest=60)
    prompts = [[5, 6, 7], [8, 9]]
    broken, sound = (engine.submit(prompt, greedy(20)) for prompt in prompts)
    bad = [*prompts[0], *answer(prompts[0], 9)]
    runner.poison = lambda context: context == bad
    late = None
    for count in range(60):
        if begins and count == 9:
            late = engine.submit([5, 6, 7, 9, 9, 9], greedy(20))
        pieces = {piece.number: piece for piece in engine.step()}
        if broken in pieces and pieces[broken].result is not None:
            result = pieces[broken].result
            assert broken in in_flight(engine)
            assert pieces[broken].token_ids == ()
            break
    results = finish(engine)
    assert result.finish_reason is FinishReason.NUMERICAL_ERROR
    assert list(result.token_ids) == answer(prompts[0], 9)
    assert list(results[sound].token_ids) == answer(prompts[1], 20)
    if late is not None:
        assert list(results[late].token_ids) == answer([5, 6, 7, 9, 9, 9], 20)
    assert launches["plain"] >= 8
    runner.poison = lambda context: False
    again = engine.submit([*bad, 5], greedy(2))
    assert finish(engine)[again].num_cached_tokens == 0, "none of its pages is shared"


def test_pages_that_run_short_in_flight_are_taken_from_the_youngest_once_the_step_is_read(
    launches: Counter[str],
) -> None:
    engine, _ = make(17, seqs=3)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12]]
    numbers = [engine.submit(prompt, greedy(40)) for prompt in prompts]
    results: dict[int, Result] = {}
    while engine.has_work:
        before = engine._in_flight
        waited, preempted = launches["waited"], engine.stats.num_preemptions
        for piece in engine.step():
            if piece.result is not None:
                results[piece.number] = piece.result
        if before is not None and engine.stats.num_preemptions > preempted:
            assert launches["waited"] > waited, "a sequence of the step in flight lost its pages"
        engine.audit()
    assert engine.stats.num_preemptions > 0
    assert launches["waited"] > 0
    assert launches["ahead"] > 40
    for number, prompt in zip(numbers, prompts, strict=True):
        assert list(results[number].token_ids) == answer(prompt, 40)


def test_a_step_that_fails_cancels_what_ran_and_what_was_launched_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = make(60, seqs=3)
    running = [engine.submit(prompt, greedy(20)) for prompt in ([5, 6, 7], [8, 9])]
    for _ in range(4):
        engine.step()
    behind = engine.submit([11] * 9, greedy(12))
    waits = engine.submit([12] * 9, greedy(12))  # no room for a fourth
    step_that_fails(engine, runner, monkeypatch)
    assert not {*running, behind} & engine.numbers
    assert engine.numbers == {waits}
    assert engine.stats.num_held_pages == 0
    assert list(finish(engine)[waits].token_ids) == answer([12] * 9, 12)
    number = engine.submit([8, 9], greedy(20))
    results = finish(engine)
    assert list(results[number].token_ids) == answer([8, 9], 20)
    assert results[number].num_cached_tokens == 0, "what its pages held is not known"


def test_an_engine_whose_last_request_was_cancelled_in_flight_goes_on_with_the_next_one() -> None:
    engine, _ = make(60)
    number = engine.submit([5, 6, 7], greedy(20))
    for _ in range(3):
        engine.step()
    engine.cancel(number)
    assert not engine.has_work
    engine.audit()
    other = engine.submit([5, 6, 7], greedy(20))
    results = finish(engine)
    assert set(results) == {other}
    assert list(results[other].token_ids) == answer([5, 6, 7], 20)


# -- drafts in flight ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 100])
def test_drafts_in_flight_give_the_plain_answers(wrong_every: int, launches: Counter[str]) -> None:
    """A step with drafts is launched before the drafts of the step before are verified on the host."""
    prompts = [[5, 6, 7], [8] * 17, [9], list(range(20, 34))]
    engine, _ = make(200, num_drafts=[4], wrong_every=wrong_every)
    numbers = [engine.submit(prompt, greedy(30)) for prompt in prompts]
    results = finish(engine)
    for number, prompt in zip(numbers, prompts, strict=True):
        assert list(results[number].token_ids) == answer(prompt, 30)
    stats = engine.stats.speculation
    assert stats is not None
    assert launches["drafts ahead"] > 4
    assert launches["uncertain"] > 4
    assert stats.num_draft_tokens > 0
    assert (stats.num_accepted_tokens > 0) == (wrong_every > 1)
    if wrong_every == 100:
        assert engine.stats.num_steps < 12, "five tokens a step"


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_drafts_in_flight_end_exactly_at_max_tokens(max_tokens: int) -> None:
    """With any number of accepted drafts, positions stay within the request's limit."""
    prompts = [[5, 6, 7], [8] * 6, [9, 10]]
    for wrong_every in (2, 3, 100):
        engine, _ = make(60, longest=24, num_drafts=[5], wrong_every=wrong_every)
        numbers = [engine.submit(prompt, greedy(max_tokens)) for prompt in prompts]
        results = finish(engine)
        for number, prompt in zip(numbers, prompts, strict=True):
            assert list(results[number].token_ids) == answer(prompt, max_tokens)
            assert results[number].finish_reason is FinishReason.LENGTH


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6))
def test_any_mixture_with_drafts_in_flight_ends_in_the_plain_answers(seed: int) -> None:
    """Pools without a page to spare, arrivals, cancelled requests, ends within and behind drafts."""
    numbers = random.Random(seed)
    longest = numbers.choice((40, 60))
    engine, _ = make(
        numbers.choice((16, 18, 22, 30, 100)), seqs=numbers.randint(1, 6),
        tokens=numbers.choice((8, 16, 64)), longest=longest,
        num_drafts=numbers.choice(([1], [3], [5, 2], [7, 3])), wrong_every=numbers.randint(1, 6),
        adaptive=numbers.random() < 0.5, mixed=numbers.choice((0, 16)),
    )  # fmt: skip
    asked: dict[int, tuple[list[int], SamplingParams]] = {}
    results: dict[int, Result] = {}
    left = numbers.randint(1, 10)
    while left or engine.has_work:
        if left and (not engine.has_work or numbers.random() < 0.3):
            prompt = [numbers.randrange(4, 9) for _ in range(numbers.randint(1, 20))]
            tokens = numbers.randint(1, longest - len(prompt))
            ends = numbers.random() < 0.3
            heat = 1.0 if numbers.random() < 0.1 else 0.0
            params = SamplingParams(
                temperature=heat, seed=left, max_tokens=tokens, ignore_eos=not ends,
                stop_token_ids=[numbers.randrange(VOCAB)] if ends else [],
            )  # fmt: skip
            asked[engine.submit(prompt, params)] = prompt, params
            left -= 1
        if numbers.random() < 0.03 and engine.has_work:
            engine.cancel(numbers.choice(sorted(engine.numbers)))
        for piece in engine.step():
            if piece.result is not None:
                results[piece.number] = piece.result
        engine.audit()
    assert engine.stats.num_held_pages == 0
    for number, result in results.items():
        expected = alone(*asked[number])
        assert result.token_ids == expected.token_ids
        assert result.finish_reason is expected.finish_reason


def test_under_constant_preemption_drafts_in_flight_give_the_plain_answers(
    launches: Counter[str],
) -> None:
    prompts = [[5 + (i * i + j) % 90 for j in range(5 + i % 9)] for i in range(20)]
    engine, _ = make(24, seqs=3, num_drafts=[4])
    numbers = [engine.submit(prompt, greedy(30)) for prompt in prompts]
    results = finish(engine)
    assert engine.stats.num_preemptions >= 1
    assert launches["uncertain"] > 10
    assert launches["waited"] > 0
    for number, prompt in zip(numbers, prompts, strict=True):
        assert list(results[number].token_ids) == answer(prompt, 30)
    stats = engine.stats.speculation
    assert stats is not None
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_logits_that_are_not_finite_end_a_request_at_the_right_place_of_its_drafts() -> None:
    prompt = [5, 6, 7]
    full = [*prompt, *answer(prompt, 20)]
    engine, runner = make(60, num_drafts=[4], wrong_every=100)
    runner.poison = lambda context: context == full[:11]
    broken, sound = engine.submit(prompt, greedy(20)), engine.submit([8, 9], greedy(20))
    results = finish(engine)
    assert results[broken].finish_reason is FinishReason.NUMERICAL_ERROR
    assert list(results[broken].token_ids) == full[3:11]
    assert list(results[sound].token_ids) == answer([8, 9], 20)
    engine.audit()
