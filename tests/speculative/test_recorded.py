"""Recorded steps, drafts and all, give the answers of steps that are run one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvant import LLM, SamplingParams
from kvant.execution.layout import lay_out, what_follows
from tests.engine.test_steady import Admissions
from tests.speculative.engines import make_llm
from tests.speculative.pair import BLOCK, Pair
from tests.speculative.recorded import record

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6 + 5 * i, ignore_eos=i % 2 == 0) for i in range(10)
]


def answers(llm: object, pair: Pair) -> list[tuple[int, ...]]:
    found = llm.generate([list(p) for p in pair.prompts], PARAMS)  # type: ignore[attr-defined]
    llm.engine.audit()  # type: ignore[attr-defined]
    return [result.token_ids for result in found]


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[tuple[int, ...]]:
    return answers(make_llm(pair, plain=True, attention_backend="reference"), pair)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 3},
        {"max_num_seqs": 5, "kv_cache_memory": "150KB", "page_size": 4},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"adaptive": True},
    ],
)
def test_steps_with_drafts_give_the_plain_answers(
    pair: Pair, plain: list[tuple[int, ...]], options: dict[str, object]
) -> None:
    llm = make_llm(pair, attention_backend="reference", **options)
    again = record(llm, (BLOCK - 1, 2) if options.get("adaptive") else (BLOCK - 1,))
    if llm.engine.speculation is not None and options.get("adaptive"):
        llm.engine.speculation._ways = llm.engine.runner.recorded
    assert answers(llm, pair) == plain
    assert again.num_runs > 10
    stats = llm.engine.stats.speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 0
    assert stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("num_seqs", [3, 10])
def test_plain_steps_give_the_plain_answers(
    pair: Pair, plain: list[tuple[int, ...]], num_seqs: int
) -> None:
    llm = make_llm(pair, plain=True, attention_backend="reference", max_num_seqs=num_seqs)
    again = record(llm)
    assert answers(llm, pair) == plain
    assert again.num_runs > 30


def test_hardly_more_is_run_than_is_used(pair: Pair) -> None:
    llm = make_llm(pair, attention_backend="reference")
    again = record(llm, (BLOCK - 1,))
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    llm.generate([list(p) for p in pair.prompts], params)
    steps = llm.engine.stats.num_steps
    assert again.num_runs < steps * 1.5


def test_sampled_answers_are_the_same_with_recorded_steps(pair: Pair) -> None:
    params = [
        SamplingParams(temperature=0.7, top_p=0.9, seed=i, max_tokens=20, ignore_eos=True)
        for i in range(len(pair.prompts))
    ]
    prompts = [list(p) for p in pair.prompts]
    plain = make_llm(pair, plain=True, attention_backend="reference")
    wanted = [result.token_ids for result in plain.generate(prompts, params)]
    llm = make_llm(pair, attention_backend="reference")
    record(llm, (BLOCK - 1,))
    assert [result.token_ids for result in llm.generate(prompts, params)] == wanted


@pytest.mark.parametrize("memory", ["150KB", "4MB"], ids=["dry", "ample"])
def test_whoever_there_is_room_for_waits_for_one_step_at_most(pair: Pair, memory: str) -> None:
    llm = make_llm(
        pair, attention_backend="reference", max_num_seqs=4, page_size=4, kv_cache_memory=memory
    )
    record(llm, (BLOCK - 1,))
    numbers, admissions, engine = random.Random(1), Admissions(), llm.engine
    left = 24
    while left or engine.has_work:
        if left and (not engine.has_work or numbers.random() < 0.25):
            params = replace(numbers.choice(PARAMS), temperature=numbers.choice((0.0, 0.0, 1.0)))
            engine.submit(numbers.choice(pair.prompts), params)
            left -= 1
        admissions.step(engine)
        engine.audit()
    assert admissions.most == 1


def test_a_layout_packs_sequences_of_different_room() -> None:
    table = torch.tensor([[5, 6, 7], [1, 2, 3], [9, 8, 4], [0, 0, 0]], dtype=torch.int32)
    starts, ends = torch.tensor([3, 6, 0, 0]), torch.tensor([6, 7, 9, 0])
    layout = lay_out(starts, ends, table, 3, 4, 100)
    assert layout.counts.tolist() == [3, 1, 4, 1]
    assert layout.step.cu_seqlens_q.tolist() == [0, 3, 4, 8, 9]
    assert layout.step.seqlens_kv.tolist() == [6, 7, 4, 0]
    assert layout.step.slot_mapping[:9].tolist() == [23, 24, 25, 10, 36, 37, 38, 39, -1]
    assert layout.step.positions[:9].tolist() == [3, 4, 5, 6, 0, 1, 2, 3, 0]
    assert layout.step.slot_mapping[9:].eq(-1).all()
    assert layout.is_first.nonzero().flatten().tolist() == [0, 3, 4, 8]


def test_what_follows_a_step_is_the_token_behind_the_drafts_that_stand() -> None:
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    starts, ends = torch.tensor([3, 6, 0, 2]), torch.tensor([6, 7, 4, 6])
    layout = lay_out(starts, ends, table, 3, 4, 100)
    tokens = torch.tensor([10, 11, 12, 20, 30, 31, 32, 33, 40, 41, 42, 43, 0, 0, 0, 0])
    chosen = torch.tensor([11, 99, 98, 21, 31, 32, 33, 34, 7, 41, 42, 43, 0, 0, 0, 0])
    newest, places = what_follows(layout, starts, tokens, chosen)
    assert newest.tolist() == [99, 21, 34, 7]
    assert places.tolist() == [5, 7, 4, 3]


def test_a_drafter_without_weights_can_be_timed(pair: Pair, tmp_path: Path) -> None:
    for name, source in (("target", pair.target), ("draft", pair.draft)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((source / "config.json").read_text())
    llm = LLM(
        tmp_path / "target", load_format="dummy", kv_cache_memory="4MB",
        speculative_config={"method": "dflash", "model": str(tmp_path / "draft"), "adaptive": False},
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (result,) = llm.generate([[5, 6, 7]], params)
    assert len(result.token_ids) == 20
    stats = llm.engine.stats.speculation
    assert stats is not None
    assert stats.num_draft_tokens > 0
