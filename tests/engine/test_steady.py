"""Steps that go on as they are: the same answers as any other steps give, whatever happens between them.

So do steps that are launched before the tokens of the step before are read, drawn ones among them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from kvant.attention.base import Step
from kvant.engine.engine import Engine
from kvant.engine.result import Progress, Result
from kvant.engine.steady import Steady
from kvant.engine.text import TextStream
from kvant.execution.batch import Batch
from kvant.execution.decodes import Decodes
from kvant.execution.graphs import StepGraphs
from kvant.execution.launched import Answered
from kvant.execution.pieces import Pieces
from kvant.execution.shared_logits import SharedLogits
from kvant.kv.pages import CacheIdentity
from kvant.plan.limits import Limits
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason, Status
from tests.engine.fakes import (
    EOS,
    VOCAB,
    RememberingRunner,
    answer,
    finish,
    logits,
    make_engine,
)  # fmt: skip
from tests.speculative.recorded import Again

PAGE = 4


class RecordedRunner(RememberingRunner):
    """Its steps are launched ahead, those of answering sequences recorded.

    forgets: whether some are launched in vain; otherwise nothing may be written twice.
    """

    forgets = True

    def __init__(self, num_pages: int, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(num_pages, PAGE)
        self._graphs = StepGraphs(
            self._forward,
            max_num_seqs,
            page_size=PAGE,
            max_model_len=max_model_len,
            device=self.device,
            recorder=Again(),
            compute=self._compute,
        )
        self._graphs.capture()

    @property
    def looks_ahead(self) -> bool:
        return True

    @property
    def finds_tokens(self) -> bool:
        return True

    def run_pieces(self, step: Pieces, following: Decodes | None) -> Tensor:
        return self._graphs.run_pieces(step, following)

    def run_behind(self, step: Pieces) -> None:
        self._graphs.run_behind(step)

    def _compute(self, batch: Batch, newest: Tensor | None, kept: SharedLogits) -> None:
        if self.forgets:
            self.stored.view(-1)[batch.step.slot_mapping] = -1  # as in `run`
        ids = batch.input_ids.clone()
        if newest is not None:
            assert (ids[: len(newest)] == 0).all()
            ids[: len(newest)] = newest
        kept.keep(super().run(replace(batch, input_ids=ids)))

    def recorded(self, num_sequences: int) -> Sequence[int]:
        return self._graphs.num_drafts(num_sequences)

    def run_decodes(self, step: Decodes) -> Tensor:
        return self._graphs.run(step)

    def read_decodes(self) -> Answered:
        return self._graphs.read()

    def run(self, batch: Batch) -> Tensor:
        self._graphs.forget()
        # What was launched ahead in vain wrote behind the ends of its sequences.
        self.stored.view(-1)[batch.step.slot_mapping] = -1
        return super().run(batch)

    def _forward(self, ids: Tensor, step: Step, index: Tensor) -> Tensor:
        rows = []
        for row, slot in enumerate(step.slot_mapping.tolist()):
            if slot >= 0:
                assert slot >= PAGE, "the scratch page is written by a request"
                self.stored.view(-1)[slot] = ids[row]
            length = int(step.seqlens_kv[row])
            pages = step.page_table[row, : -(-length // PAGE)].long()
            context = self.stored[pages].flatten()[:length].tolist()
            rows.append(
                torch.full((VOCAB,), torch.nan) if self.poison(context) else logits(context)
            )
        return torch.stack(rows)


def make(
    num_pages: int, seqs: int = 6, longest: int = 60, tokenizer: Tokenizer | None = None
) -> tuple[Engine, RecordedRunner]:
    runner = RecordedRunner(num_pages, seqs, longest)
    limits = Limits(seqs, 32, longest, PAGE, pages_ahead=True)
    identity = CacheIdentity("fake", None, "plan")
    engine = Engine(
        runner, limits, num_pages, identity=identity, vocab_size=VOCAB, eos_token_ids=(EOS,),
        tokenizer=tokenizer,
    )  # fmt: skip
    return engine, runner


WISHES: tuple[dict[str, Any], ...] = (
    {}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.8}, {"min_p": 0.05, "top_k": 20},
)  # fmt: skip


def some_params(numbers: random.Random) -> SamplingParams:
    """Greedy and drawn ones of all kinds; few whose steps cannot be launched ahead."""
    given: dict[str, Any] = {"temperature": 0.0}
    if numbers.random() < 0.6:
        heat = numbers.choice((0.3, 1.0, 2.0))
        given = {"temperature": heat, "seed": numbers.randrange(50), **numbers.choice(WISHES)}
    if numbers.random() < 0.04:
        given |= numbers.choice(
            ({"logprobs": 1}, {"presence_penalty": 1.0}, {"min_tokens": 9}, {"prompt_logprobs": 2})
        )
    ignored = numbers.random() < 0.7
    tokens = (
        numbers.choice((10, 11, 30)) if "min_tokens" in given else numbers.choice((1, 2, 11, 30))
    )
    if "prompt_logprobs" in given:
        tokens = numbers.choice((0, 1, 11))
    return SamplingParams(max_tokens=tokens, ignore_eos=ignored, **given)


def alone(prompt: list[int], params: SamplingParams) -> Result:
    """Step by step, each of which is read before the next begins."""
    engine, _ = make_engine()
    engine.submit(prompt, params)
    (result,) = [p.result for _ in range(params.max_tokens or 1) for p in engine.step() if p.result]
    return result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of recorded steps: those launched ahead, those among them that draw, and those that were not ahead."""
    found: Counter[str] = Counter()
    launch = StepGraphs._launch

    def count(self: StepGraphs, step: Decodes, after: Any) -> object:
        found["ahead" if after is not None else "read"] += 1
        found["drawn"] += after is not None and step.draws is not None
        return launch(self, step, after)

    monkeypatch.setattr(StepGraphs, "_launch", count)
    return found


@pytest.fixture
def went_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of sequences of every step that went on as it was."""
    sizes: list[int] = []
    run = Steady.run

    def count(steady: Steady, runner: RecordedRunner) -> Answered:
        sizes.append(len(steady.sequences))
        return run(steady, runner)

    monkeypatch.setattr(Steady, "run", count)
    return sizes


@pytest.mark.parametrize("num_pages", [16, 30, 200], ids=["dry", "short", "ample"])
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_each_request_alone(
    seed: int, num_pages: int, went_on: list[int], launches: Counter[str]
) -> None:
    """Greedy ones beside drawn ones; arrivals, ends of every kind, cancelled ones, some whose steps
    cannot be launched ahead, dry pools.
    """
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
    assert len(went_on) > 15
    assert max(went_on) >= 2
    assert num_pages > 16 or engine.stats.num_preemptions > 0
    assert len(results) > 60
    for number, result in results.items():
        prompt, params = asked[number]
        expected = alone(prompt, params)
        assert list(result.token_ids) == list(expected.token_ids) == streamed[number]
        assert result.finish_reason is expected.finish_reason
        assert result.logprobs == expected.logprobs
        assert result.prompt_logprobs == expected.prompt_logprobs
        if params.is_greedy and not params.presence_penalty and not params.min_tokens:
            assert params.max_tokens is not None
            eos = None if params.ignore_eos else EOS
            assert list(result.token_ids) == answer(prompt, params.max_tokens, eos=eos)
    assert launches["drawn"] > (5 if num_pages == 16 else 60)


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
    """Whoever comes, ends, is cancelled or preempted meanwhile; some have stop strings, which end them."""
    engine, _ = make(num_pages, tokenizer=words)
    numbers: dict[int, Want] = {}
    results: dict[int, Result] = {}
    shown: dict[int, str] = {}
    count = 0
    while engine.has_work or count <= max(want.comes for want in wants):
        for want in wants:
            if want.comes == count:
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=want.max_tokens,
                    ignore_eos=want.ignore_eos,
                    stop=want.stop,
                )
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
def test_requests_with_text_go_on_as_they_are_unless_their_text_may_end_them(
    words: Tokenizer, went_on: list[int], stop: tuple[str, ...]
) -> None:
    engine, _ = make(100, tokenizer=words)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for prompt in ([5, 6, 7], [8, 9]):
        engine.submit(prompt, params)
    engine.submit([4], replace(params, max_tokens=20, stop=stop))
    while engine.has_work:
        engine.step()
    assert len(went_on) == (0 if stop else 18)


def test_a_request_that_arrives_lets_the_step_that_runs_be_told(launches: Counter[str]) -> None:
    """The device runs the answers' next step already: its tokens are not thrown away for a prompt."""
    engine, _ = make(200)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    told: list[int] = []
    for _ in range(3):
        engine.submit([5, 6, 7], params)
        for _ in range(5):
            told.append(len([piece for piece in engine.step() if piece.token_ids]))
    # Its prompt, two recorded steps of which the second runs ahead, two that go on; from the second
    # request on, the step that runs comes first.
    assert told == [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3]
    while engine.has_work:
        engine.step()
    # Three steps had a prompt; one launch was behind the end of everybody.
    assert sum(launches.values()) == engine.stats.num_steps - 3 + 1


def test_steps_are_launched_ahead_while_those_who_wait_have_no_room(
    launches: Counter[str], went_on: list[int]
) -> None:
    engine, _ = make(200, seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for _ in range(6):
        engine.submit([5, 6, 7], params)
    while engine.has_work:
        engine.step()
    assert len(went_on) == 3 * 18
    assert launches["read"] == 0, "also behind their prompts"


@pytest.mark.parametrize("num_pages", [16, 200], ids=["dry", "ample"])
def test_the_device_is_asked_for_exactly_what_other_steps_ask_for(
    num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*, steady: bool) -> list[object]:
        numbers = random.Random(7)
        engine, runner = make(num_pages)
        calls: list[object] = []
        run, zero, run_decodes = runner.run, runner.zero, runner.run_decodes

        def note_run(batch: Batch) -> Tensor:
            calls.append(("run", batch.input_ids.tolist(), batch.step.slot_mapping.tolist()))
            return run(batch)

        def note_zero(pages: Sequence[int]) -> None:
            calls.append(("zero", list(pages)))
            zero(pages)

        def note_decodes(step: Decodes) -> Tensor:
            parts = step.ids, step.starts, step.ends, step.limits, step.table
            values = [None if part is None else part.tolist() for part in parts]
            if step.draws is not None:
                values += [step.draws.numbers(later).tolist() for later in (0, 1)]
            calls.append(("decodes", step.numbers, step.num_drafts, *values))
            return run_decodes(step)

        with monkeypatch.context() as noted:
            noted.setattr(runner, "run", note_run)
            noted.setattr(runner, "zero", note_zero)
            noted.setattr(runner, "run_decodes", note_decodes)
            if not steady:
                noted.setattr(Steady, "goes_on", False)
            for _ in range(12):
                for _ in range(numbers.randint(0, 3)):
                    prompt = [numbers.randrange(4, VOCAB) for _ in range(numbers.randint(1, 20))]
                    tokens, heat = numbers.randint(1, 40), numbers.choice((0.0, 1.0))
                    engine.submit(
                        prompt, SamplingParams(temperature=heat, max_tokens=tokens, seed=1)
                    )
                for _ in range(numbers.randint(1, 20)):
                    engine.step()
            while engine.has_work:
                engine.step()
        return calls

    found = asked(steady=True)
    assert len(found) > 100
    assert found == asked(steady=False)


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
    assert (launches["ahead"], launches["read"]) == (40, 0), "what ended was only left out"
    assert launches["drawn"] == (40 if heat else 0)


def test_logits_of_all_recorded_steps_lie_in_one_place() -> None:
    def forward(ids: Tensor, step: Step, index: Tensor) -> Tensor:
        return torch.ones(len(index), 7, dtype=torch.bfloat16)

    graphs = StepGraphs(
        forward, 20, page_size=PAGE, max_model_len=64, device=torch.device("cpu"),
        recorder=Again(), draft=lambda tokens, _: tokens, num_drafts=[3],
    )  # fmt: skip
    graphs.capture()
    made = [graph.logits for graph in graphs._graphs.values()]
    assert {len(logits) for logits in made} >= {1, 4, 16, 20, 80}
    assert {logits.data_ptr() for logits in made} == {made[0].data_ptr()}
    assert {logits.dtype for logits in made} == {torch.float32}


def test_counts_and_cached_pages_are_those_of_other_steps(went_on: list[int]) -> None:
    engine, _ = make(60)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    first = engine.submit([5, 6, 7], params)
    results = [piece.result for _ in range(40) for piece in engine.step() if piece.result]
    assert results[0].number == first
    assert sum(went_on) >= 15
    stats = engine.stats
    assert (stats.num_steps, stats.num_computed_tokens) == (20, 3 + 19)
    known = [5, 6, 7, *results[0].token_ids]
    engine.submit(known, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    (again,) = [piece.result for piece in engine.step() if piece.result]
    assert again.num_cached_tokens == 20, "pages that filled in steady steps are found"


def test_logits_that_are_no_numbers_end_only_their_own_request(went_on: list[int]) -> None:
    engine, runner = make(60)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9]]
    broken, sound = (engine.submit(prompt, params) for prompt in prompts)
    runner.poison = lambda context: context[:3] == prompts[0] and len(context) == 12
    results = finish(engine)
    assert results[broken].finish_reason is FinishReason.NUMERICAL_ERROR
    assert list(results[broken].token_ids) == answer(prompts[0], 9)
    assert list(results[sound].token_ids) == answer(prompts[1], 20)
    assert went_on.count(2) >= 4
    assert went_on.count(1) >= 4


def step_that_fails(
    engine: Engine, runner: RecordedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose tokens cannot be read; the engine is sound behind it."""

    def fail() -> Answered:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(runner, "read_decodes", fail)
        with pytest.raises(RuntimeError):
            engine.step()
    engine.audit()


def test_a_failing_device_cancels_what_ran_and_leaves_the_engine_sound(
    went_on: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = make(60)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for prompt in ([5, 6, 7], [8, 9]):
        engine.submit(prompt, params)
    while not went_on:
        engine.step()
    step_that_fails(engine, runner, monkeypatch)
    assert not engine.has_work
    number = engine.submit([8, 9], params)
    pieces = [piece for _ in range(20) for piece in engine.step()]
    assert [token for piece in pieces for token in piece.token_ids] == answer([8, 9], 20)
    assert {piece.number for piece in pieces} == {number}


class Admissions:
    """Who would be begun in the next step if nobody waited for the step that runs already."""

    def __init__(self) -> None:
        self.missed: Counter[int] = Counter()
        self.most = 0

    def step(self, engine: Engine) -> list[Progress]:
        """A step; `most` is how often in a row anybody was not begun in one who could have been."""
        steady, scheduler = deepcopy((engine._steady, engine.scheduler))
        if steady is not None:
            steady.settle()
        waited = [s for s in scheduler.sequences() if s.status is Status.WAITING]
        scheduler.schedule()
        begun = {s.number for s in waited if s.status is Status.RUNNING}
        try:
            return engine.step()
        finally:
            still = {s.number for s in engine.scheduler.sequences() if s.status is Status.WAITING}
            for number in {s.number for s in waited}:
                self.missed[number] = self.missed[number] + 1 if number in begun & still else 0
                self.most = max(self.most, self.missed[number])


@pytest.mark.parametrize("num_pages", [16, 24, 200], ids=["dry", "short", "ample"])
@pytest.mark.parametrize("seed", range(3))
def test_whoever_there_is_room_for_waits_for_one_step_at_most(
    seed: int, num_pages: int, went_on: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind steps that fail, streams that begin or are left, requests that are cancelled."""
    numbers = random.Random(seed)
    engine, runner = make(num_pages)

    def failing(run: Any) -> Any:
        def run_or_fail(*given: object) -> object:
            if numbers.random() < 0.01:
                raise RuntimeError("the device is gone")
            return run(*given)

        return run_or_fail

    for name in ("run_decodes", "run_pieces", "run_behind", "read_decodes"):
        monkeypatch.setattr(runner, name, failing(getattr(runner, name)))
    admissions = Admissions()
    left, streams = 60, []
    while left or engine.has_work:
        if left and (not engine.has_work or numbers.random() < 0.15):
            for _ in range(min(left, numbers.choice((1, 1, 2, 5)))):
                prompt = [numbers.randrange(4, 8) for _ in range(numbers.choice((1, 2, 9, 20)))]
                number = engine.submit(prompt, some_params(numbers))
                left -= 1
                if numbers.random() < 0.1:
                    streams.append(engine.stream(number))
        if numbers.random() < 0.02:
            streams.clear()  # nobody has them any more: their requests are cancelled
        if numbers.random() < 0.03 and engine.has_work:
            engine.cancel(numbers.choice(sorted(engine.numbers)))
        with suppress(RuntimeError):
            admissions.step(engine)
        engine.audit()
    assert admissions.most <= 1
    assert len(went_on) > 10
