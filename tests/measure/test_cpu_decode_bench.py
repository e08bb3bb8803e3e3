"""The timing of an engine's steps: what is timed is what it says."""

from __future__ import annotations

from pathlib import Path

from kvant import LLM
from kvant.measure.cpu_decode_bench import WARM_UP_STEPS, Case, time_engine
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
