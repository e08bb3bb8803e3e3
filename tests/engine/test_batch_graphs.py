"""Steps with pieces of prompts, recorded: the same answers and the same bytes as without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant import LLM, SamplingParams
from kvant.engine.result import Result
from kvant.execution import graphs
from kvant.execution.runner import ModelRunner
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.plan.graph_sizes import MOST_PIECES, PieceSize, piece_sizes, short_piece
from kvant.scheduling import scheduler
from tests.models import tiny
from tests.speculative.recorded import Again

PROMPTS = [[5 + (i * i + n) % 110 for i in range(n)] for n in (70, 3, 129, 1, 64, 65, 200, 17)]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=3 + 2 * i) for i in range(len(PROMPTS))]
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "num_speculative_tokens": 4, "adaptive": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("qwen3", tmp_path_factory.mktemp("tiny"))


def opened(path: Path, **options: object) -> tuple[LLM, ModelRunner]:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 96, "kv_cache_dtype": "nvfp4", **options}
    llm = LLM(path, device="cpu", dtype="float64", max_model_len=300, **given)  # type: ignore[arg-type]
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    return llm, runner


def recorded(path: Path, **options: object) -> tuple[LLM, ModelRunner]:
    llm, runner = opened(path, **options)
    limits = llm.engine.limits
    runner.record(Again(), limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len)
    return llm, runner


def told(results: list[Result]) -> list[object]:
    return [(result.token_ids, result.finish_reason) for result in results]


@pytest.mark.parametrize("options", [{}, {"speculative_config": NGRAM}], ids=["plain", "drafts"])
def test_answers_and_stored_bytes_are_those_of_steps_that_are_not_recorded(
    path: Path, options: dict[str, object], held: list[bool]
) -> None:
    (plain, one), (fast, other) = opened(path, **options), recorded(path, **options)
    assert told(fast.generate(PROMPTS, PARAMS)) == told(plain.generate(PROMPTS, PARAMS))
    assert held.count(True) > 6
    for a, b in zip(one.pool.planes(), other.pool.planes(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), "padding was written"
    fast.engine.audit()


def test_log_probabilities_of_prompts_are_the_same(path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, logprobs=1)
    (plain, _), (fast, _) = opened(path), recorded(path)
    for a, b in zip(plain.generate(PROMPTS, params), fast.generate(PROMPTS, params), strict=True):
        assert a.prompt_logprobs is not None
        assert b.prompt_logprobs is not None
        assert a.token_ids == b.token_ids
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert abs(x.logprob - y.logprob) < 1e-9  # type: ignore[union-attr]


@pytest.mark.parametrize("bound", ["MOST_CONTEXT", "MOST_READ"])
def test_long_pieces_behind_long_contexts_are_left_to_steps_that_know_their_cut(
    path: Path, bound: str, held: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, bound, 100)
    monkeypatch.setattr(graphs, "LONG", 32)
    (plain, _), (fast, _) = opened(path), recorded(path)
    assert told(fast.generate(PROMPTS, PARAMS)) == told(plain.generate(PROMPTS, PARAMS))
    assert held.count(True) >= 1
    assert held.count(False) >= 1


def test_short_pieces_behind_long_contexts_are_recorded(
    path: Path, held: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MOST_CONTEXT", 100)
    (plain, _), (fast, _) = opened(path), recorded(path)
    assert told(fast.generate(PROMPTS, PARAMS)) == told(plain.generate(PROMPTS, PARAMS))
    assert held
    assert all(held)


def test_the_end_of_a_prompt_behind_a_long_context_is_computed_in_short_pieces_beside_answers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "FAR", 64)
    (plain, _), (fast, runner) = opened(path), recorded(path)
    short = short_piece(layer.geometry for layer in runner.model.plan.layers)
    assert short > 1
    engine = fast.engine
    limits = replace(engine.limits, short_piece=short)
    monkeypatch.setattr(engine.scheduler, "limits", limits)
    pieces, sizes, work = [], [], engine.scheduler.schedule
    mixed = runner._graphs._mixed  # type: ignore[union-attr]
    assert mixed is not None
    for size, replay in list(mixed._replays.items()):

        def noted(size: PieceSize = size, replay: Callable[[], None] = replay) -> None:
            sizes.append(size)
            replay()

        mixed._replays[size] = noted

    def spied(*given: Any) -> Any:
        schedule = work(*given)
        if schedule is not None and schedule.num_prefills:
            first = schedule.num_decodes
            rows = zip(
                schedule.starts[first:].tolist(), schedule.counts[first:].tolist(), strict=True
            )
            pieces.extend((start, count, first > 0) for start, count in rows)
        return schedule

    monkeypatch.setattr(engine.scheduler, "schedule", spied)
    assert told(fast.generate(PROMPTS, PARAMS)) == told(plain.generate(PROMPTS, PARAMS))
    assert all(
        count <= short or not start >= 64 or count > 16 for start, count, beside in pieces if beside
    )
    assert any(count == short and start >= 64 for start, count, beside in pieces)
    assert any(size.longest == short for size in sizes)
    engine.audit()


def test_every_step_has_the_smallest_size_that_holds_it() -> None:
    sizes = piece_sizes(256, 8448)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == (MOST_PIECES, 256, MOST_PIECES)
    assert all(size.seqs <= size.tokens == size.longest for size in sizes)
    assert all(b[0] <= a[0] + 128 for a, b in pairwise(sizes))
    assert piece_sizes(4, 20) == [(20, 4, 20)]
    assert piece_sizes(512, 16) == [(16, 16, 16)]


@pytest.mark.parametrize(
    ("most_seqs", "most_tokens", "expected"),
    [
        (1, 8192, []),
        (24, 8192, [(32, 24, 4)]),
        (32, 8192, [(32, 32, 4), (64, 32, 4)]),
        (256, 8192, [(32, 32, 4), (64, 64, 4), (128, 128, 4), (256, 256, 4)]),
        (256, 64, [(32, 32, 4), (64, 64, 4)]),
        (256, 24, []),
    ],
)
def test_short_pieces_beside_answers_have_sizes_of_their_own(
    most_seqs: int, most_tokens: int, expected: list[tuple[int, int, int]]
) -> None:
    plain, sizes = piece_sizes(most_seqs, most_tokens), piece_sizes(most_seqs, most_tokens, 4)
    assert [size for size in sizes if size not in plain] == expected
    assert set(plain) <= set(sizes)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ([(32, 8)], 4),
        ([(64, 8)], 2),
        ([(8, 8)], 16),
        ([(32, 8), (32, 2)], 0),
        ([(32, 2)], 0),
        ([], 0),
    ],
)
def test_a_short_piece_fills_the_smallest_program(
    heads: list[tuple[int, int]], expected: int
) -> None:
    layers = [
        LayerGeometry(i, "", Attention.FULL, q, kv, 128, 128) for i, (q, kv) in enumerate(heads)
    ]
    assert short_piece(layers) == expected
    latents = LayerGeometry(9, "", Attention.MLA, 16, 1, 576, 512)
    assert short_piece([*layers, latents]) == 0


def test_batch_invariant_mode_records_none(path: Path, held: list[bool]) -> None:
    llm, _ = recorded(path, batch_invariant=True)
    llm.generate(PROMPTS, PARAMS)
    assert not held
