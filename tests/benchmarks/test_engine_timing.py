"""The timing of an engine's steps: what is timed is what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks import device_idle, engine_timing
from benchmarks.device_idle import Idle
from benchmarks.engine_timing import WARM_UP_STEPS, Case, time_engine

from kvant import LLM
from tests.models import tiny


def test_every_timed_decode_step_brings_each_sequence_a_token(tmp_path: Path) -> None:
    llm = LLM(
        tiny.build("llama", tmp_path), max_num_seqs=3, max_num_batched_tokens=16, max_model_len=96
    )
    cases = [Case(True, 3, 40), Case(False, 2, 40)]
    decode, prefill = time_engine(llm.engine, cases, repeats=5)
    assert (len(decode.milliseconds), decode.tokens) == (5, 3)
    assert (len(prefill.milliseconds), prefill.tokens) == (1, 80)
    assert decode.tokens_per_second == 3000 / decode.median_ms
    # 120 prompt tokens, then the timed steps; twice 80 prompt tokens: a step holds 16
    assert llm.engine.stats.num_steps >= 8 + WARM_UP_STEPS + 5 + 2 * 5
    assert not llm.engine.has_work


def test_profiled_steps_decode_every_sequence_behind_the_timed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny.build("llama", tmp_path), max_num_seqs=3, max_model_len=96)
    found = Idle(7, 0.01, 0.0, 2.0, 10.0, 11.0, 100)
    steps: list[int] = []

    def profiled(device: torch.device, step: Callable[[], None], number: int) -> Idle:
        before = llm.engine.stats.num_computed_tokens
        for _ in range(device_idle.WARM_UP_STEPS + number):
            step()
        steps.append(llm.engine.stats.num_computed_tokens - before)
        return found

    monkeypatch.setattr(engine_timing, "measure_idle", profiled)
    (timing,) = time_engine(llm.engine, [Case(True, 3, 40)], repeats=5, profiled=7)
    assert (len(timing.milliseconds), timing.idle) == (5, found)
    assert steps == [3 * (device_idle.WARM_UP_STEPS + 7)]
    assert not llm.engine.has_work
