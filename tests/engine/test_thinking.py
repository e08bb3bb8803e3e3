"""Budgets of thinking: exact, equal in every engine, and without effect on answers that think less."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvant.engine.engine import Engine
from kvant.engine.result import Result
from kvant.errors import RequestError
from kvant.sampling.grammar import GrammarCompiler
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import StructuredOutputs
from kvant.sampling.thinking import Thinking, thinking_marks
from tests.engine.fakes import EOS, VOCAB, finish, logits, make_engine
from tests.engine.in_flight import make

_TAGS = ("<think>", "</think>", "<|im_start|>")
_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")


def tokenizer_with(marks: Sequence[str]) -> Tokenizer:
    """The fake model's 97 tokens: marks from token 4 on, the end, and printable ASCII."""
    taken = {4 + place: mark for place, mark in enumerate(marks)}
    ids = [i for i in range(4, VOCAB) if i not in taken]
    texts = ["\u0120", *(chr(c) for c in range(126, 33, -1))][: len(ids)]
    texts[-1] = "\u010a"  # a line's end
    vocab = {**dict(zip(texts, ids, strict=True)), "<|eos|>": EOS}
    vocab |= {mark: token for token, mark in taken.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", *marks])
    return tokenizer


TAGS = tokenizer_with(_TAGS)
OPEN, CLOSE, TURN = (TAGS.token_to_id(mark) for mark in _TAGS)
INSIDE, BEFORE, AFTER = [TURN, 30, OPEN, 31], [OPEN, 40, TURN, 30], [TURN, OPEN, CLOSE, 30]


def thought(prompt: Sequence[int], output: Sequence[int]) -> tuple[bool, bool, int]:
    """Whether the answer is inside thinking now, whether it ever thought, and its tokens of thinking."""
    last = max((i + 1 for i, token in enumerate(prompt) if token == TURN), default=0)
    inside = ever = False
    count = 0
    for place, token in enumerate([*prompt[last:], *output]):
        if inside and token == CLOSE:
            inside = False
        elif inside:
            count += place >= len(prompt) - last
        elif token == OPEN:
            inside = ever = True
    return inside, ever, count


def by_definition(prompt: Sequence[int], num_tokens: int, budget: int) -> list[int]:
    """The fake model's greedy answer with a budget, read from its beginning before every token."""
    output: list[int] = []
    while len(output) < num_tokens:
        inside, ever, count = thought(prompt, output)
        row = logits([*prompt, *output])
        if count >= budget and inside:
            output.append(CLOSE)
            continue
        if count >= budget and ever:
            row[OPEN] = -torch.inf
        output.append(int(row.argmax()))
    return output


def greedy(budget: int | None, num_tokens: int = 24, **more: Any) -> SamplingParams:
    given = {"temperature": 0.0, "ignore_eos": True, **more}
    return SamplingParams(thinking_token_budget=budget, max_tokens=num_tokens, **given)


def one(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Result:
    number = engine.submit(prompt, params)
    return finish(engine)[number]


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    return {
        "read at once": make_engine(tokenizer=TAGS)[0],
        "one ahead": make(60, tokenizer=TAGS)[0],
        "drafts ahead": make(60, tokenizer=TAGS, num_drafts=(3, 0), wrong_every=4)[0],
    }


_PROMPTS = st.builds(
    lambda head, kind, tail: [*head, *kind, *tail],
    st.lists(st.integers(7, VOCAB - 1), max_size=4),
    st.sampled_from([INSIDE, BEFORE, AFTER]),
    st.lists(st.integers(7, VOCAB - 1), max_size=3),
)


@settings(max_examples=15, deadline=None)
@given(prompt=_PROMPTS, budget=st.integers(0, 20))
def test_every_engine_gives_the_answer_of_the_definition(
    engines: dict[str, Engine], prompt: list[int], budget: int
) -> None:
    expected = by_definition(prompt, 24, budget)
    assert thought(prompt, expected)[2] <= budget
    for name, engine in engines.items():
        assert list(one(engine, prompt, greedy(budget)).token_ids) == expected, name


@settings(max_examples=15, deadline=None)
@given(prompt=_PROMPTS, budget=st.integers(0, 12), seed=st.integers(0, 99))
def test_thinking_has_at_most_its_budget_and_changes_nothing_if_it_is_shorter(
    engines: dict[str, Engine], prompt: list[int], budget: int, seed: int
) -> None:
    """Sampled answers of a model that likes to begin and to end thinking."""
    likes = {"temperature": 1.0, "seed": seed, "logit_bias": {OPEN: 3.0, CLOSE: 3.0}}
    free = one(engines["read at once"], prompt, greedy(None, 30, **likes)).token_ids
    for name, engine in engines.items():
        bound = one(engine, prompt, greedy(budget, 30, **likes)).token_ids
        assert thought(prompt, bound)[2] <= budget, name
        used = [thought(prompt, free[:n])[2] for n in range(len(free) + 1)]
        spent = next((n for n, count in enumerate(used) if count >= budget), len(free))
        assert bound[:spent] == free[:spent], name
        if used[-1] < budget:
            assert bound == free, name


def test_a_budget_of_nothing_closes_thinking_at_once_and_no_limit_changes_nothing() -> None:
    engine, _ = make_engine(tokenizer=TAGS)
    assert one(engine, INSIDE, greedy(0)).token_ids[0] == CLOSE
    likes = {"logit_bias": {OPEN: 50.0}}
    found = one(engine, BEFORE, greedy(0, **likes)).token_ids
    assert found[:2] == (OPEN, CLOSE)
    assert OPEN not in found[2:], "thinking does not begin again"
    assert one(engine, INSIDE, greedy(-1)).token_ids == one(engine, INSIDE, greedy(None)).token_ids


def test_nothing_else_that_a_request_asks_for_keeps_thinking_open() -> None:
    engine, _ = make_engine(tokenizer=TAGS)
    against = {
        "logit_bias": {CLOSE: -100.0},
        "allowed_token_ids": [50, 51],
        "bad_words": ["a"],
        "frequency_penalty": 2.0,
        "min_tokens": 20,
    }
    found = one(engine, INSIDE, greedy(3, **against)).token_ids
    assert found[3] == CLOSE
    assert {*found} == {50, 51, CLOSE}
    ended = one(engine, INSIDE, greedy(3, stop_token_ids=[CLOSE]))
    assert (ended.token_ids[-1], len(ended.token_ids), ended.stop_reason) == (CLOSE, 4, CLOSE)


def test_n_answers_have_a_budget_each() -> None:
    engine, _ = make_engine(tokenizer=TAGS)
    params = SamplingParams(
        n=4, seed=5, thinking_token_budget=6, max_tokens=16, ignore_eos=True, temperature=1.0
    )
    numbers = engine.submit_choices(INSIDE, params)
    results = finish(engine)
    answers = [results[number].token_ids for number in numbers]
    assert len({*answers}) == 4
    for answer, params_of_one in zip(answers, params.choices(), strict=True):
        assert answer[6] == CLOSE or CLOSE in answer[:6]
        assert one(make_engine(tokenizer=TAGS)[0], INSIDE, params_of_one).token_ids == answer


@pytest.mark.parametrize("num_drafts", [(), (3, 0)], ids=["plain", "drafts"])
def test_a_crowd_under_pressure_gets_what_each_gets_alone(num_drafts: tuple[int, ...]) -> None:
    """Preempted, streamed, cancelled, beside requests without a budget, one step ahead."""
    numbers = random.Random(3)
    engine, _ = make(16, tokenizer=TAGS, num_drafts=num_drafts)
    asked, streams, results = {}, {}, {}
    for index in range(30):
        prompt = [7 + index, *numbers.choice((INSIDE, BEFORE, AFTER))]
        heat = {"temperature": 1.0, "seed": index} if index % 3 else {}
        params = greedy(numbers.choice((None, 0, 1, 5, 9, 30)), numbers.choice((5, 30)), **heat)
        number = engine.submit(prompt, params)
        asked[number] = prompt, params
        if index % 7 == 0:
            streams[number] = engine.stream(number)
        results |= {piece.number: piece.result for piece in engine.step() if piece.result}
        if index % 9 == 5 and number not in results:
            engine.cancel(number)
            del asked[number]
    results |= finish(engine)
    for number, (prompt, params) in asked.items():
        alone = one(make_engine(tokenizer=TAGS)[0], prompt, params)
        assert results[number].token_ids == alone.token_ids
        assert results[number].finish_reason == alone.finish_reason
    for number, stream in streams.items():
        tokens = [token for piece in stream for token in piece.token_ids]
        assert number not in asked or tuple(tokens) == results[number].token_ids
    assert engine.stats.num_preemptions > 0


def test_the_device_chooses_tokens_while_the_budget_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make(60, tokenizer=TAGS)
    hosts = []
    launch = engine.runner.launch
    monkeypatch.setattr(
        engine.runner,
        "launch",
        lambda *given: (hosts.append(given[0].needs_host), launch(*given))[1],
    )
    prompt = next(
        p for n in range(7, 90) if CLOSE not in by_definition(p := [n, *INSIDE], 20, 10)[:10]
    )
    assert list(one(engine, prompt, greedy(10, 20)).token_ids) == by_definition(prompt, 20, 10)
    first = hosts.index(True)
    assert first >= 8, "two tokens may be in flight when the host must begin to choose"
    assert all(hosts[first:])


# -- forms behind thinking ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TAGS, VOCAB, [EOS])


def formed(compiler: GrammarCompiler, prompt: Sequence[int], **given: Any) -> Result:
    engine, _ = make_engine(tokenizer=TAGS)
    engine._forms._compiler = compiler
    params = {"max_tokens": 200, "temperature": 1.0, **given}
    return one(engine, prompt, SamplingParams(**params))


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from([INSIDE, BEFORE, AFTER]),
    budget=st.sampled_from([0, 1, 4, 9, -1]),
    seed=st.integers(0, 99),
    keen=st.booleans(),
)
def test_a_form_begins_behind_thinking(
    compiler: GrammarCompiler, kind: list[int], budget: int, seed: int, keen: bool
) -> None:
    form = StructuredOutputs(json={"enum": ["ab", "cd", 12]})
    likes = {OPEN: 12.0 if keen else 0.0, CLOSE: 4.0}
    found = formed(
        compiler,
        kind,
        structured_outputs=form,
        thinking_token_budget=budget,
        seed=seed,
        logit_bias=likes,
    )
    if found.finish_reason == "length":
        assert budget == -1
        return
    assert found.finish_reason == "stop"
    inside, _, count = thought(kind, found.token_ids)
    assert not inside
    assert budget == -1 or count <= budget
    ends = [place for place, token in enumerate(found.token_ids) if token == CLOSE]
    assert len(ends) == (kind is INSIDE or (kind is BEFORE and OPEN in found.token_ids))
    behind = found.token_ids[ends[-1] + 1 if ends else 0 :]
    assert json.loads(TAGS.decode(list(behind))) in ("ab", "cd", 12)


def test_without_a_budget_a_form_begins_with_the_answer(compiler: GrammarCompiler) -> None:
    form = StructuredOutputs(choice=["ab"])
    assert formed(compiler, INSIDE, structured_outputs=form).text == "ab"


def test_a_grammar_that_knows_thinking_is_told_only_its_marks(compiler: GrammarCompiler) -> None:
    grammar = f'start: <[{OPEN}]> TEXT <[{CLOSE}]> "xy" | "z"\nTEXT: /[0-9]*/'
    form = StructuredOutputs(grammar=grammar, with_thinking=True)
    likes = {OPEN: 100.0}
    found = formed(
        compiler, BEFORE, structured_outputs=form, thinking_token_budget=5, logit_bias=likes, seed=1
    )
    assert found.token_ids[0] == OPEN
    assert found.token_ids[6] == CLOSE
    assert TAGS.decode(list(found.token_ids[7:])) == "xy"


# -- marks -------------------------------------------------------------------------------------


def test_marks_of_several_tokens_open_only_when_they_are_complete() -> None:
    tokenizer = tokenizer_with(_HARMONY)
    marks = thinking_marks(tokenizer, VOCAB)
    assert marks is not None

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    assert list(marks.opening) == ids("<|channel|>analysis<|message|>")
    thinking = Thinking(marks, 2, ids("<|start|>user<|message|>a<|end|><|start|>assistant"))
    for token in ids("<|channel|>commentary<|message|>abc<|end|><|start|>assistant"):
        assert thinking.forced is None
        assert thinking.banned is None
        thinking.advance(token)
    for token in ids("<|channel|>analysis<|message|>ab"):
        assert thinking.forced is None
        thinking.advance(token)
    assert thinking.forced == marks.end
    thinking.advance(marks.end)
    assert not thinking.is_inside
    for token in ids("<|start|>assistant<|channel|>"):
        assert thinking.banned is None
        thinking.advance(token)
    assert thinking.banned == ids("a")[0], "the only channel that is thinking"


def test_a_form_in_the_final_channel_gets_its_header() -> None:
    tokenizer = tokenizer_with(_HARMONY)
    engine, _ = make_engine(tokenizer=tokenizer)
    prompt = tokenizer.encode("<|start|>assistant", add_special_tokens=False).ids
    channel = tokenizer.token_to_id("<|channel|>")
    params = SamplingParams(
        structured_outputs=StructuredOutputs(choice=["ok"]), thinking_token_budget=4, max_tokens=90,
        logit_bias={channel: 100.0}, seed=1,
    )  # fmt: skip
    found = tokenizer.decode(list(one(engine, prompt, params).token_ids), skip_special_tokens=False)
    begin, end = (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>ok",
    )
    assert found.startswith(begin)
    assert found.endswith(end)
    assert 0 < len(found.removeprefix(begin).removesuffix(end)) <= 4


def test_families_are_known_by_their_tokens() -> None:
    gemma = thinking_marks(tokenizer_with(("<|channel>", "<channel|>", "<|turn>")), VOCAB)
    assert gemma is not None
    assert len(gemma.opening) == len("thought") + 1
    assert gemma.closing[-1] == gemma.end
    assert len(gemma.closing) > 1
    assert thinking_marks(tokenizer_with(("[THINK]", "[/THINK]")), VOCAB) is not None
    assert thinking_marks(tokenizer_with(("<think>",)), VOCAB) is None
    assert thinking_marks(TAGS, OPEN) is None, "its logits have no such token"


def test_a_model_without_marks_refuses_a_budget_by_name() -> None:
    for tokenizer in (None, tokenizer_with(())):
        engine, _ = make_engine(tokenizer=tokenizer)
        with pytest.raises(RequestError, match="no token of this model is known") as refused:
            engine.submit([5], SamplingParams(thinking_token_budget=3))
        assert refused.value.param == "thinking_token_budget"
        engine.submit([5], SamplingParams(thinking_token_budget=-1))
    with pytest.raises(RequestError, match="at least -1"):
        SamplingParams(thinking_token_budget=-2)
