"""Everything a request can ask for gives the same answer with and without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvant.engine.llm import LLM
from kvant.engine.result import Result
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import StructuredOutputs
from tests.engine import tiny_chat
from tests.speculative.scripted import speculate

PROMPTS = ["The sea", "Once upon", "x", "hello hello hello"]

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 4},
    "without a seed": {"temperature": 0.8},
    "top-k": {"temperature": 0.9, "seed": 1, "top_k": 7},
    "top-p": {"temperature": 0.9, "seed": 2, "top_p": 0.6},
    "min-p": {"temperature": 0.9, "seed": 3, "min_p": 0.2},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.8},
    "penalties, sampled": {
        "temperature": 0.7, "seed": 8, "presence_penalty": 1.0, "repetition_penalty": 1.3,
    },
    "min_tokens": {"min_tokens": 12, "ignore_eos": False},
    "stop token": {"stop_token_ids": tuple(range(30, 60)), "min_tokens": 3},
    "bias": {"logit_bias": {40: 6.0, 50: -100.0}},
    "bad words": {"bad_words": ("a", "e", "t")},
    "allowed": {"allowed_token_ids": tuple(range(20, 60))},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "regex": {"structured_outputs": StructuredOutputs(regex=r"[a-f]{3}-[0-9]{4,9}[x-z]*")},
    "choice": {"structured_outputs": StructuredOutputs(choice=("yes it is", "no it is not"))},
    "json": {
        "structured_outputs": StructuredOutputs(
            json={"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}},
                  "required": ["n"], "additionalProperties": False}
        ),
        "temperature": 0.6, "seed": 5,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.build(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return open_llm(model)


def open_llm(model: Path) -> LLM:
    return LLM(model, dtype="float64", kv_cache_memory="4MB", seed=0, page_size=4)


def facts(result: Result) -> tuple[object, ...]:
    """All that a user sees of an answer, log-probabilities apart."""
    return (
        result.token_ids, result.text, result.finish_reason, result.stop_reason,
        result.num_prompt_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_gives_the_same_answer_with_drafts(model: Path, name: str) -> None:
    options = {"temperature": 0.0, "max_tokens": 24, **OPTIONS[name]}
    if "structured_outputs" not in options:
        options = {"ignore_eos": True, **options}
    params = SamplingParams(**options)
    plain = open_llm(model).generate(PROMPTS, params)
    llm = open_llm(model)
    speculate(llm.engine, [[*r.prompt_token_ids, *r.token_ids] for r in plain], wrong_every=4)
    drafted = llm.generate(PROMPTS, params)
    assert [facts(r) for r in drafted] == [facts(r) for r in plain]
    for one, other in zip(drafted, plain, strict=True):
        for field in ("logprobs", "prompt_logprobs"):
            mine, others = getattr(one, field), getattr(other, field)
            assert (mine is None) == (others is None)
            for a, b in zip(mine or (), others or (), strict=True):
                if a is not None:
                    assert (a.token_id, a.rank) == (b.token_id, b.rank)
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
    stats = llm.engine.stats.speculation
    assert stats is not None
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    llm.engine.audit()


@pytest.mark.parametrize("stop_length", [1, 3])
def test_a_stop_string_within_the_drafts_ends_the_answer_there(
    model: Path, stop_length: int
) -> None:
    first = open_llm(model).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    text = max((r.text for r in first), key=len)
    stop = text[6 : 6 + stop_length]
    params = SamplingParams(temperature=0, max_tokens=24, stop=(stop,), ignore_eos=True)
    plain = open_llm(model).generate(PROMPTS, params)
    assert any(r.stop_reason == stop for r in plain)
    llm = open_llm(model)
    speculate(
        llm.engine, [[*r.prompt_token_ids, *r.token_ids] for r in first], wrong_every=1000, most=7
    )
    assert [facts(r) for r in llm.generate(PROMPTS, params)] == [facts(r) for r in plain]


def test_several_answers_to_one_prompt_are_those_without_drafts(model: Path) -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=16, ignore_eos=True)

    def answers(llm: LLM) -> list[tuple[int, ...]]:
        engine = llm.engine
        numbers = engine.submit_choices(llm.encode(PROMPTS[0]), params)
        found: dict[int, tuple[int, ...]] = {}
        while engine.has_work:
            for piece in engine.step():
                if piece.result is not None:
                    found[piece.number] = piece.result.token_ids
        return [found[number] for number in numbers]

    llm = open_llm(model)
    plain = answers(llm)
    assert len(set(plain)) == 3
    drafting = open_llm(model)
    prompt = llm.encode(PROMPTS[0])
    speculate(drafting.engine, [[*prompt, *tokens] for tokens in plain], wrong_every=5)
    assert answers(drafting) == plain
    stats = drafting.engine.stats.speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 0


def test_streamed_pieces_come_one_for_each_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (plain,) = llm.generate([PROMPTS[0]], params)
    speculate(llm.engine, [[*plain.prompt_token_ids, *plain.token_ids]], wrong_every=6)
    pieces = list(llm.stream(PROMPTS[0], params))
    assert [len(piece.token_ids) for piece in pieces] == [1] * 20
    assert "".join(piece.text for piece in pieces) == plain.text


def test_a_proposer_outside_kvant_is_one_file(model: Path) -> None:
    llm = LLM(
        model, dtype="float64", kv_cache_memory="4MB",
        speculative_config={"method": "tests.speculative.scripted:METHOD", "wrong_every": 2},
    )  # fmt: skip
    (result,) = llm.generate(["abc"], SamplingParams(temperature=0, max_tokens=8))
    (plain,) = open_llm(model).generate(["abc"], SamplingParams(temperature=0, max_tokens=8))
    assert result.token_ids == plain.token_ids
    assert llm.metrics()["spec_decode_num_drafts"] > 0
