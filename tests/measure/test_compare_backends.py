"""Backends beside each other over one text, in queries as long as the engine's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, LongQuery, Step
from kvant.attention.need import LONG
from kvant.attention.reference.backend import ReferenceBackend
from kvant.engine.llm import LLM
from kvant.errors import NotServable
from kvant.execution.runner import ModelRunner
from kvant.kv.pool import LayerCache
from kvant.measure import teacher_forced
from kvant.measure.teacher_forced import text_logits
from tests.engine import tiny_chat

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "compare_backends", SCRIPTS / "compare_backends.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_chat.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "problems.jsonl"
    problem = {"question": "How many seas are open?", "answer": "The sea, the open sea.\n#### 1"}
    path.write_text(2 * (json.dumps(problem) + "\n"))
    return path


class Recording(ReferenceBackend):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        if cache.spec.geometry.index == 0:
            self.steps.append(step)
        return super().attend(cache, q, step, params)


def test_long_chunks_of_a_text_are_long_queries(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, dtype="float32", kv_cache_memory="1MiB", attention_backend="reference")
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    held = Recording()
    monkeypatch.setattr(
        teacher_forced, "load_backends", lambda plan, **_: (held,) * len(plan.layers)
    )
    text_logits(runner.model, llm.plan, [5] * (2 * LONG + 3), chunk=LONG)
    assert [step.long for step in held.steps] == [
        (LongQuery(0, 0, LONG, LONG),), (LongQuery(0, 0, LONG, 2 * LONG),), (),
    ]  # fmt: skip
    assert all(step.rest is None for step in held.steps)


def test_every_format_is_read_by_every_backend_and_the_result_becomes_a_table(
    model: Path, text: Path, tmp_path: Path
) -> None:
    data = tmp_path / "docs" / "benchmarks"
    data.mkdir(parents=True)
    out = data / "fp8-quality.json"
    script().main(
        [str(model), "--text", str(text), "--device", "cpu", "--tokens", "40", "--chunk", "16",
         "--dtype", "float32", "--format", "float32", "--format", "fp8_e5m2",
         "--backend", "cpu", "--backend", "reference", "--out", str(out)]
    )  # fmt: skip
    told = json.loads(out.read_text())
    assert (told["tokens"], told["chunk"], told["compute"]) == (40, 16, "float32")
    baseline, same, other, *narrow = told["rows"]
    assert (baseline["format"], baseline["backend"]) == ("float32", "cpu")
    assert baseline["mean_kl"] is None
    assert (same["backend"], same["mean_kl"], same["same_top"]) == ("cpu", 0, 1)
    assert (other["backend"], other["mean_kl"]) == ("reference", pytest.approx(0, abs=1e-8))
    assert same["nll"] == baseline["nll"] == pytest.approx(other["nll"], rel=1e-5)
    assert [r["backend"] for r in narrow] == ["cpu", "reference"]
    assert all(r["format"] == "fp8_e5m2" and r["mean_kl"] > 1e-6 for r in narrow)
    assert all(0 < r["kl_error"] < r["mean_kl"] for r in narrow)

    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: fp8-quality -->\n<!-- end -->\n")
    command = [sys.executable, str(SCRIPTS / "benchmark_tables.py"), "--root", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    lines = readme.read_text().splitlines()
    assert lines[3] == f"| float32 | cpu | - | - | - | {baseline['nll']:.4f} |"
    assert lines[4] == f"| float32 | cpu | 0.00000 | 0.00000 | 100.0 % | {same['nll']:.4f} |"


def test_likelihood_is_that_of_the_formula() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.3, 0.5]]))
    found = script()._nll(logits, [0, 1, 2])
    assert found == pytest.approx(-(torch.tensor([0.25, 0.8]).log().mean().item()))


def test_a_text_that_is_too_short_and_a_backend_that_cannot_are_told(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(model), "--text", str(text), "--device", "cpu", "--format", "fp8_e4m3", "--tokens"]
    with pytest.raises(SystemExit):
        script().main([*asked, "500", "--backend", "cpu"])
    assert "--tokens 500" in capsys.readouterr().err
    with pytest.raises(NotServable, match="triton_fp8"):
        script().main([*asked, "20", "--backend", "triton_fp8"])


@pytest.mark.parametrize(
    ("changed", "told"),
    [(["--format", "int4_per_token_head"], "int4"), (["--chunk", "16"], "not 16")],
    ids=str,
)
def test_fp8_products_are_measured_only_where_they_are_defined(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str], changed: list[str], told: str
) -> None:
    asked = ["--text", str(text), "--device", "cpu", "--format", "fp8_e4m3", "--backend", "cpu"]
    with pytest.raises(SystemExit):
        script().main([str(model), *asked, "--tokens", "20", "--defined", *changed])
    assert told in capsys.readouterr().err
