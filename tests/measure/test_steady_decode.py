"""`kvant bench decode`: every timed step decodes, in the formats that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant import LLM
from kvant.engine.runner import ModelRunner
from kvant.errors import ConfigError
from kvant.measure.steady_decode import parse_stored, steady_decode, table
from tests.models import tiny
from tests.speculative.recorded import Again


def test_formats_and_rules_are_timed_as_asked(tmp_path: Path) -> None:
    llm = LLM(tiny.build("llama", tmp_path), dtype="float32", max_model_len=64, device="cpu")
    asked = ["float32", "fp8_per_token_head", "fp8_per_token_head;0:float32"]
    wide, narrow, mixed = found = list(steady_decode(llm, asked, batch=3, context=100, steps=4))
    assert [len(one.timing.milliseconds) for one in found] == [4, 4, 4]
    assert wide.timing.tokens == 3
    assert narrow.bytes_per_token < mixed.bytes_per_token < wide.bytes_per_token
    layers = llm.planned.target.geometry.layers
    each = (wide.bytes_per_token - narrow.bytes_per_token) / len(layers)
    assert mixed.bytes_per_token == narrow.bytes_per_token + each
    assert table(found).count("\n") == 4


def test_what_is_no_format_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_stored("fp9")
    with pytest.raises(ConfigError):
        parse_stored("fp8;nowhere")


def test_recorded_steps_are_what_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny.build("llama", tmp_path), dtype="float32", max_model_len=64, device="cpu")
    again = Again()

    monkeypatch.setattr(ModelRunner, "capture", lambda runner, *sizes: runner.record(again, *sizes))
    (one,) = steady_decode(llm, ["fp8_per_token_head"], batch=3, context=100, steps=4)
    assert len(one.timing.milliseconds) == 4
    assert again.num_runs >= 4
