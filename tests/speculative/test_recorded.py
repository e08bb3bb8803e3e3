"""Recorded steps, drafts and all, give the answers of steps that are run one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvant import LLM, SamplingParams
from kvant.execution.batch import Launched
from kvant.execution.device_state import DeviceState
from kvant.execution.graphs import StepGraphs, accepted, lay_out
from kvant.scheduling.scheduler import Schedule
from tests.engine.in_flight import Admissions
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
        llm.engine.speculation._ways = llm.engine.runner.num_drafts
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
def test_a_request_that_there_is_room_for_is_admitted_by_the_next_step(
    pair: Pair, memory: str
) -> None:
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
    assert admissions.most == 0
    assert admissions.num_begun > 12


@pytest.mark.parametrize("memory", ["150KB", "4MB"], ids=["dry", "ample"])
def test_steps_with_drafts_are_launched_before_the_drafts_in_flight_are_verified(
    pair: Pair, plain: list[tuple[int, ...]], memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sequence stands is then known on the device alone."""
    llm = make_llm(
        pair, attention_backend="reference", max_num_seqs=10, page_size=4, kv_cache_memory=memory
    )
    record(llm, (BLOCK - 1,))
    uncertain: list[bool] = []
    launch = StepGraphs.launch

    def count(graphs: StepGraphs, schedule: Schedule, *given: object) -> Launched:
        uncertain.append(schedule.limits is not None)
        return launch(graphs, schedule, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(StepGraphs, "launch", count)
    assert answers(llm, pair) == plain
    assert uncertain.count(True) > 4


FAR = torch.full((4,), 1000)


def some_state() -> DeviceState:
    """Rows 0 to 4, and one for padding."""
    state = DeviceState(5, 3, torch.device("cpu"))
    state.tokens.copy_(torch.tensor([50, 51, 52, 53, 54, 99]))
    state.lengths.copy_(torch.tensor([3, 0, 6, 1, 2, 77]))
    pages = [[5, 6, 7], [9, 8, 4], [1, 2, 3], [11, 12, 13], [14, 15, 16], [99, 99, 99]]
    state.pages.copy_(torch.tensor(pages))
    return state


def test_a_layout_packs_sequences_of_different_room() -> None:
    """Negative tokens and starts stand for what the device has; the last row is padding."""
    table = torch.empty(4, 3, dtype=torch.int32)
    rows, tokens = torch.tensor([0, 2, 1, 5]), torch.tensor([-1, 20, -1, 0])
    starts, counts = torch.tensor([-1, 6, 0, 0]), torch.tensor([3, 1, 4, 0])
    newest, step, owners, is_first, found = lay_out(
        rows, tokens, starts, counts, FAR, some_state(), table[None], 3, 4, 100
    )
    assert newest[:3].tolist() == [50, 20, 51]
    assert found.tolist() == [3, 1, 4, 1]
    assert step.page_table.tolist()[:3] == [[5, 6, 7], [1, 2, 3], [9, 8, 4]]
    assert step.cu_seqlens_q.tolist() == [0, 3, 4, 8, 9]
    assert step.seqlens_kv.tolist() == [6, 7, 4, 0]
    assert step.slot_mapping[:9].tolist() == [23, 24, 25, 10, 36, 37, 38, 39, -1]
    assert step.positions[:9].tolist() == [3, 4, 5, 6, 0, 1, 2, 3, 0]
    assert step.slot_mapping[9:].eq(-1).all()
    assert owners[:9].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3]
    assert is_first.nonzero().flatten().tolist() == [0, 3, 4, 8]
    assert (step.max_seqlen_q, step.max_seqlen_kv) == (4, 100)


def test_a_sequence_gets_its_accepted_drafts_and_one_token_more() -> None:
    table = torch.empty(4, 3, dtype=torch.int32)
    rows, tokens = torch.tensor([0, 2, 1, 4]), torch.tensor([10, 20, 30, 40])
    starts, counts = torch.tensor([3, 6, 0, 2]), torch.tensor([3, 1, 4, 4])
    _, _, owners, is_first, counts = lay_out(
        rows, tokens, starts, counts, FAR, some_state(), table[None], 3, 4, 100
    )
    ran = torch.tensor([10, 11, 12, 20, 30, 31, 32, 33, 40, 41, 42, 43, 0, 0, 0, 0])
    chosen = torch.tensor([11, 99, 98, 21, 31, 32, 33, 34, 7, 41, 42, 43, 0, 0, 0, 0])
    assert accepted(ran, chosen, owners, is_first, counts).tolist() == [2, 1, 4, 1]


def test_a_sequence_stores_nothing_from_its_limit_on() -> None:
    """The host does not know where drafts in flight end, so the device drops what has no room."""
    table = torch.empty(3, 3, dtype=torch.int32)
    rows, given = torch.tensor([0, 2, 3]), torch.tensor([-1, -1, -1])
    limits = torch.tensor([5, 6, 1000])  # they stand at 3, 6 and 1
    _, step, _, _, counts = lay_out(
        rows, given, given, torch.tensor([4, 4, 4]), limits, some_state(), table[None], 3, 4, 100
    )
    assert counts.tolist() == [2, 1, 4]
    assert step.seqlens_kv.tolist() == [5, 0, 5]
    assert step.slot_mapping[:3].tolist() == [23, 24, -1]


def test_without_drafts_a_sequence_gets_one_token() -> None:
    table = torch.empty(3, 3, dtype=torch.int32)
    rows, given = torch.tensor([4, 5, 0]), torch.tensor([-1, 0, -1])
    newest, step, owners, is_first, counts = lay_out(
        rows, given, given, torch.tensor([1, 0, 1]), FAR[:3], some_state(), table[None], 0, 4, 100
    )
    assert newest[[0, 2]].tolist() == [54, 50]
    assert step.positions.tolist() == [2, 0, 3]
    assert step.slot_mapping.tolist() == [58, -1, 23]
    assert step.seqlens_kv.tolist() == [3, 0, 4]
    chosen = torch.tensor([1, 2, 3])
    assert accepted(newest[owners], chosen, owners, is_first, counts).tolist() == [1, 1, 1]


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
