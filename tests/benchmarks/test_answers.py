"""`python -m benchmarks.invariance --what answers`: answers are compared up to where they part."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from benchmarks import answers
from benchmarks.answers import Answers, Way, answer, compare, compare_all, read_answers

from kvant import LLM
from kvant.errors import ConfigError
from kvant.execution.batch import Launched
from kvant.execution.graphs import StepGraphs
from kvant.execution.runner import ModelRunner
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest
from kvant.scheduling.scheduler import Schedule
from tests.models import tiny
from tests.speculative.recorded import record_here

FP8 = FormatRequest(KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.FP8_PER_TOKEN_HEAD)
GIVEN = Answers("fp8", "cpu", "float32", False, "alone", ((1, 2, 3), (4, 5), (6,)))


def test_what_follows_the_first_other_token_is_not_compared() -> None:
    other = replace(GIVEN, way="batch", tokens=((1, 9, 3), (4, 5), (7,)))
    found = compare(other, GIVEN)
    assert (found.flips, found.positions) == (2, 2 + 2 + 1)
    assert (found.way, found.beside) == ("batch", "alone")


def test_ways_are_compared_with_each_other_and_with_answers_from_elsewhere(
    tmp_path: Path,
) -> None:
    batch, on = replace(GIVEN, way="batch"), replace(GIVEN, batch_invariant=True)
    file = tmp_path / "other.json"
    rows = [
        asdict(replace(GIVEN, tokens=((1, 2, 4), (4, 5), (6,)))),
        asdict(replace(on, format="int8")),
    ]
    file.write_text(json.dumps({"answers": rows}))
    found = [
        (a.way, a.beside, a.batch_invariant, a.flips)
        for a in compare_all([GIVEN, batch, on], read_answers(file))
    ]
    assert found == [
        ("alone", "elsewhere, alone", False, 1),
        ("batch", "alone", False, 0),
        ("batch", "elsewhere, alone", False, 1),
        ("alone", "elsewhere, alone", True, 1),
    ]
    file.write_text("{}")
    with pytest.raises(ConfigError):
        read_answers(file)


def test_prompts_are_answered_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [([3 + i, 5, 7 + i], 2 + i) for i in range(4)]
    monkeypatch.setattr(answers, "prompts_of", lambda _: prompts)
    llm = LLM(tiny.build("llama", tmp_path), dtype="float32", max_model_len=64, device="cpu",
              batch_invariant=True)  # fmt: skip
    alone, batch = answer(llm, FP8, [Way.ALONE, Way.BATCH])
    assert [len(tokens) for tokens in alone.tokens] == [2, 3, 4, 5]
    assert (alone.way, alone.batch_invariant, alone.dtype) == ("alone", True, "float32")
    assert compare(batch, alone).positions == 14
    assert batch.tokens == alone.tokens


def test_steps_are_recorded_but_in_the_way_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    launch = StepGraphs._launch_decodes

    def count(graphs: StepGraphs, schedule: Schedule, *given: object) -> Launched:
        sizes.append(len(schedule.sequences))
        return launch(graphs, schedule, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "capture", record_here)
    monkeypatch.setattr(StepGraphs, "_launch_decodes", count)
    monkeypatch.setattr(answers, "prompts_of", lambda _: [([3, 5 + i], 2 + i) for i in range(3)])
    llm = LLM(tiny.build("llama", tmp_path), dtype="float32", max_model_len=64, device="cpu")
    found = answer(llm, FP8, list(Way))
    next(found)
    assert sizes == [1] * 6
    next(found)
    assert sizes[6:] == [3, 2, 1]
    next(found)
    assert len(sizes) == 9
