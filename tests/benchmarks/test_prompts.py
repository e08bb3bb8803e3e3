"""Figures of prompts: what is attended to, what is counted, and what a recorded result becomes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from benchmarks import prompts
from benchmarks.prompts import PROMPTS, READ, Prompts, Timed, flop, measure, rows, table
from torch import Tensor

from kvant.attention.base import AttentionParams, LongQuery, Step
from kvant.attention.need import LONG
from kvant.attention.reference.backend import ReferenceBackend
from kvant.attention.triton.info import INFO as TRITON
from kvant.attention.triton_fp8.info import INFO as TRITON_FP8
from kvant.kv.dtype import KVDtype
from kvant.kv.pool import LayerCache
from kvant.measure.attention_inputs import Case, make_inputs

CPU = torch.device("cpu")
BF16, E4M3 = KVDtype.BFLOAT16, KVDtype.FP8_E4M3
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "queries"), [((5, 9), 5), ((7,), 1), ((40, 33, 12), 12)])
def test_a_pair_counts_where_a_query_sees_a_key(
    lengths: tuple[int, ...], queries: int, causal: bool
) -> None:
    case = Case(BF16, BF16, lengths, queries, causal, q_heads=6, head_dim=16)
    seen = 0
    for length in lengths:
        mask = torch.ones(queries, length, dtype=torch.bool)
        seen += int(mask.tril(length - queries).sum() if causal else mask.sum())
    assert flop(case) == 4 * 16 * 6 * seen


def test_prompts_of_4_x_8192_are_2_2_million_million_operations() -> None:
    assert flop(PROMPTS["4 x 8192"].case(BF16)) == pytest.approx(2.199e12, rel=1e-3)


def test_many_queries_of_a_sequence_are_listed_as_in_the_engine() -> None:
    small = {"q_heads": 2, "kv_heads": 1, "head_dim": 16}
    x = make_inputs(Case(BF16, BF16, (LONG, LONG + 40), LONG, **small), CPU)  # type: ignore[arg-type]
    assert x.step.long == (LongQuery(0, 0, LONG, LONG), LongQuery(1, LONG, LONG, LONG + 40))
    assert x.step.rest is None
    few = make_inputs(Case(BF16, BF16, (LONG,), LONG - 1, **small), CPU)  # type: ignore[arg-type]
    assert not few.step.long


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=list(PROMPTS))
def test_every_case_has_long_queries_and_what_others_are_held_against(prompts: Prompts) -> None:
    assert prompts.new >= LONG
    assert BF16 in prompts.formats
    assert set(prompts.formats) & set(READ[TRITON_FP8])
    assert prompts.case(E4M3).lengths == (prompts.before + prompts.new,) * prompts.count


class Recording(ReferenceBackend):
    """Notes what it is asked for instead of computing it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[KVDtype, tuple[LongQuery, ...]]] = []

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        assert cache.spec.k is not None
        self.asked.append((cache.spec.k.dtype, step.long))
        return q


def test_contestants_take_turns_over_steps_with_long_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def elapsed(run: Callable[[], object]) -> float:
        run()
        return 50e3

    monkeypatch.setattr(prompts, "elapsed_us", elapsed)
    monkeypatch.setitem(PROMPTS, "2 x 256 after 64", Prompts(2, 256, 64, (BF16, E4M3)))
    held = {TRITON: Recording(), TRITON_FP8: Recording()}
    found = measure("2 x 256 after 64", (BF16, E4M3), held, CPU)
    assert [(t.backend, t.dtype) for t in found] == [
        (TRITON, BF16), (TRITON, E4M3), (TRITON_FP8, E4M3),
    ]  # fmt: skip
    # A group of 200 ms is of four calls of 50 ms, and takes 50 ms by this clock.
    assert [t.us for t in found] == [[12.5e3] * prompts.REPEATS] * 3
    long = (LongQuery(0, 0, 256, 320), LongQuery(1, 256, 256, 320))
    assert {step for _, step in held[TRITON].asked} == {long}
    group = [BF16] * 5 + [E4M3] * 5  # one call before each
    assert [dtype for dtype, _ in held[TRITON].asked[6:]] == group * prompts.REPEATS


def timed(backend: object, dtype: KVDtype, *us: float) -> Timed:
    assert backend in (TRITON, TRITON_FP8)
    info = TRITON if backend is TRITON else TRITON_FP8
    return Timed("4 x 8192", info, dtype, 2 * 10**12, list(us))


FOUND = rows(
    [
        timed(TRITON, BF16, 4100, 4000, 3000),
        timed(TRITON, E4M3, 5000, 5000, 5000),
        timed(TRITON_FP8, E4M3, 2500, 2400, 2600),
    ]
)


def test_medians_are_held_against_triton_in_bfloat16_and_in_the_same_format() -> None:
    assert [r.median_us for r in FOUND] == [4000, 5000, 2500]
    assert [r.tflops for r in FOUND] == [500, 400, 800]
    assert [r.over_bfloat16 for r in FOUND] == [1, 0.8, 1.6]
    assert [r.over_triton for r in FOUND] == [None, None, 2]
    last = table(FOUND).splitlines()[-1].split()
    assert last[-6:] == ["triton_fp8", "fp8_e4m3", "2500.0", "800", "1.60", "2.00"]


def test_what_was_not_measured_is_no_figure() -> None:
    (alone,) = rows([timed(TRITON_FP8, E4M3, 2500)])
    assert (alone.over_bfloat16, alone.over_triton) == (None, None)
    assert table([alone]).split()[-2:] == ["-", "-"]


def test_a_backend_that_reads_none_of_the_formats_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        prompts.main(["--backend", "triton_fp8", "--format", "nvfp4"])
    assert "triton_fp8 reads none of nvfp4" in capsys.readouterr().err


def test_a_recorded_result_becomes_a_table(tmp_path: Path) -> None:
    data = tmp_path / "docs" / "benchmarks"
    data.mkdir(parents=True)
    (data / "h200-prompts.json").write_text(json.dumps({"rows": [asdict(r) for r in FOUND]}))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: prompt-attention -->\n<!-- end -->\n")
    command = [sys.executable, "-m", "benchmarks.tables", "--root", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    lines = readme.read_text().splitlines()
    assert lines[3] == "| 4 x 8192 | triton | bfloat16 | 4000 | 500 | 1.00 | - |"
    assert lines[5] == "| 4 x 8192 | triton_fp8 | fp8_e4m3 | 2500 | 800 | 1.60 | 2.00 |"
