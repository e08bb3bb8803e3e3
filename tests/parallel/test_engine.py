"""What an engine does besides greedy answers: two ranks do it as one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvant import LLM, SamplingParams
from kvant.errors import NotServable, RequestError
from kvant.measure.teacher_forced import TextReader
from kvant.parallel.runner import RankedRunner
from kvant.sampling.structured_outputs import StructuredOutputs
from tests.engine import tiny_chat
from tests.parallel.test_equality import make

PROMPTS = ("The sea, the sea, the sea, the", "One two three one two", "abc" * 12, "z")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 7},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "min_p": 0.02},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    "bias": {"temperature": 0, "logit_bias": {5: 4.0, 7: -3.0}, "frequency_penalty": 0.5},
    "regex": {"temperature": 0.8, "seed": 1, "structured_outputs": StructuredOutputs(regex="[a-f]{6}")},
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.build(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair(path: Path) -> tuple[LLM, LLM]:
    """Two ranks, one device; with room for a few short texts only."""
    options: dict[str, Any] = {
        "kv_cache_dtype": "float32", "kv_cache_memory": "148KiB", "max_model_len": 96,
        "max_num_batched_tokens": 24, "seed": 5, "attention_backend": "reference",
    }  # fmt: skip
    return make(path, 2, **{**options, "kv_cache_memory": "74KiB"}), make(path, 1, **options)


def test_every_way_to_choose_tokens(pair: tuple[LLM, LLM]) -> None:
    two, one = pair
    for name, way in WAYS.items():
        params = SamplingParams(max_tokens=20, **way)
        found, expected = two.generate(PROMPTS, params), one.generate(PROMPTS, params)
        assert [r.token_ids for r in found] == [r.token_ids for r in expected], name
        assert [r.finish_reason for r in found] == [r.finish_reason for r in expected], name
        for a, b in zip(found, expected, strict=True):
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
    again = two.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=4))[0]
    assert again.num_cached_tokens > 0  # an earlier request computed it
    two.engine.audit()


def test_preempted_requests_go_on_as_if_nothing_had_been(pair: tuple[LLM, LLM]) -> None:
    two, one = pair
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    prompts = ["a", "bc", "def", "ghij", "k"]
    assert [r.token_ids for r in two.generate(prompts, params)] == [
        r.token_ids for r in one.generate(prompts, params)
    ]
    assert two.engine.stats.num_preemptions == one.engine.stats.num_preemptions > 0
    two.engine.audit()


def test_cancelled_and_refused_requests_leave_the_others_alone(pair: tuple[LLM, LLM]) -> None:
    two, one = pair
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = one.generate(PROMPTS[0], params)[0].token_ids
    engine = two.engine
    kept = engine.submit(two.encode(PROMPTS[0]), params)
    dropped = engine.submit(two.encode(PROMPTS[1]), params)
    with pytest.raises(RequestError):
        engine.submit([], params)
    found = None
    for turn in range(60):
        if turn == 4:
            engine.cancel(dropped)
        for piece in engine.step() if engine.has_work else ():
            if piece.number == kept and piece.result is not None:
                found = piece.result.token_ids
    assert found == expected
    engine.audit()


def test_prompt_lookup_drafts(path: Path) -> None:
    options = {"speculative_config": {"method": "ngram", "adaptive": False}, "max_model_len": 256}
    two, one = make(path, 2, **options), make(path, 1, **options)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    assert [r.token_ids for r in two.generate(PROMPTS, params)] == [
        r.token_ids for r in one.generate(PROMPTS, params)
    ]
    stats = two.engine.stats.speculation
    assert stats is not None
    assert stats.num_draft_tokens > 0


def test_ranks_count_saturated_values_together(path: Path) -> None:
    """Values beyond fp8's range lie in heads of every rank."""
    two, one = (make(path, n, kv_cache_dtype="fp8_e4m3", max_model_len=96) for n in (2, 1))
    for llm in (two, one):
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4))
    counts = [
        {s.layer: (s.k, s.v) for s in llm.engine.runner.count_saturated()()} for llm in (two, one)
    ]
    assert counts[0] == counts[1]


def test_a_measurement_beside_the_engine_is_refused_instead_of_waiting(path: Path) -> None:
    """Other ranks would not come."""
    runner = make(path, 2).engine.runner
    assert isinstance(runner, RankedRunner)
    reader = TextReader(runner.model, runner.model.plan, 1, 16)
    with pytest.raises(NotServable, match="one device"):
        reader.read(torch.tensor([[5, 6, 7, 8]]))
