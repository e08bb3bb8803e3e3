"""`python -m benchmarks.scheduler`: what it times is what it says, and a step stays cheap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.engine_loop import full_engine
from benchmarks.scheduler_steps import Load, measure

from tests.benchmarks.command import benchmark


def test_a_steady_load_decodes_a_token_of_every_sequence_in_every_step() -> None:
    load = Load(20, turnover=0)
    assert [load.step()[3] for _ in range(40)] == [20] * 40
    assert load.scheduler.audit() == []


def test_a_mixed_load_holds_decodes_and_prefills_and_stays_full() -> None:
    load = Load(20, turnover=2)
    tokens = []
    for _ in range(40):
        load.turn_over()
        tokens.append(load.step()[3])
        assert load.scheduler.num_running == 20
    assert min(tokens) >= 18 + 2 * 256
    assert load.scheduler.audit() == []


def test_the_table_and_the_file_say_the_same(tmp_path: Path) -> None:
    out = tmp_path / "scheduler.json"
    ran = benchmark(
        "scheduler", "--sequences", "4", "--sequences", "8", "--steps", "5", "--out", out
    )
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(out.read_text())
    assert {"date", "command", "commit", "device", "python", "torch", "numpy"} < set(facts)
    assert [(row["load"], row["sequences"]) for row in facts["rows"]] == [
        ("decode", 4), ("decode", 8), ("mixed", 4), ("mixed", 8),
    ]  # fmt: skip
    assert [row["sequences"] for row in facts["whole"]] == [4, 8]
    times = [row["total_us"] for row in facts["rows"]]
    for time in times + [row["median_us"] for row in facts["whole"]]:
        assert time > 0
        assert f"{time / 1e3:.3f}" in ran.stdout


def test_the_whole_loop_hands_on_a_token_of_every_sequence_in_every_step() -> None:
    engine = full_engine(20)
    for _ in range(40):
        pieces = engine.step()
        assert sorted(piece.number for piece in pieces) == list(range(20))
        assert {piece.token_ids for piece in pieces} == {(0,)}
        engine.audit()


@pytest.mark.slow
def test_a_step_of_256_sequences_costs_at_most_a_millisecond() -> None:
    best = min(measure("decode", 256, 100).total_us for _ in range(3))
    assert best <= 1000
