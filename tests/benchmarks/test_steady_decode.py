"""`python -m benchmarks.decode`: every timed step decodes, in the formats that were asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.device_idle import Idle, NotProfiled
from benchmarks.steady_decode import parse_stored, steady_decode, table

from kvant import LLM
from kvant.errors import BadValue, ConfigError
from kvant.execution.runner import ModelRunner
from tests.benchmarks.command import benchmark
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


def test_contexts_end_where_the_models_positions_do(tmp_path: Path) -> None:
    llm = LLM(tiny.build("llama", tmp_path), dtype="float32", max_model_len=64, device="cpu")
    longest = llm.planned.target.geometry.max_model_len
    assert longest is not None
    with pytest.raises(BadValue, match=f"positions end at {longest}") as caught:
        next(steady_decode(llm, ["float32"], batch=1, context=longest, steps=2))
    most = int(str(caught.value).split("at most ")[1].split()[0])
    assert next(steady_decode(llm, ["float32"], batch=1, context=most, steps=2)).timing.tokens == 1


def test_recorded_steps_are_what_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny.build("llama", tmp_path), dtype="float32", max_model_len=64, device="cpu")
    again = Again()

    monkeypatch.setattr(ModelRunner, "capture", lambda runner, *sizes: runner.record(again, *sizes))
    (one,) = steady_decode(llm, ["fp8_per_token_head"], batch=3, context=100, steps=4)
    assert len(one.timing.milliseconds) == 4
    assert again.num_runs >= 4


def test_what_was_not_profiled_is_not_shown_as_a_figure(tmp_path: Path) -> None:
    llm = LLM(tiny.build("llama", tmp_path), dtype="float32", max_model_len=64, device="cpu")
    (one,) = steady_decode(llm, ["float32"], batch=3, context=450, steps=4, profiled=5)
    assert len(one.timing.milliseconds) == 4
    assert one.timing.idle == NotProfiled("steps run on the CPU")
    assert "| float32 | not measured | - |" in table([one])
    assert "device idle" not in table([replace(one, timing=replace(one.timing, idle=None))])
    found = Idle(5, 0.0123, 0.004, 55.5, 10.0, 12.5, 900)
    shown = table([replace(one, timing=replace(one.timing, idle=found))])
    assert "| float32 | 1.23 % | 0.40 % | 55.5 | 10.000 | 12.500 |" in shown


def test_the_command_says_that_it_could_not_profile(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    ran = benchmark(
        "decode", "-m", tiny.build("llama", tmp_path / "model"), "--device", "cpu",
        "--dtype", "float32", "--kv-format", "float32", "--batch", "2", "--context", "40",
        "--steps", "3", "--profile-steps", "2", "--out", out,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "float32: idle time not measured: steps run on the CPU" in ran.stderr
    assert "| float32 | not measured |" in ran.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert row["timing"]["idle"] == {"why": "steps run on the CPU"}
    assert len(row["timing"]["milliseconds"]) == 3
