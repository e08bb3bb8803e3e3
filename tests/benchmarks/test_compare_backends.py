"""Backends beside each other over one text, in queries as long as the engine's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import compare_backends

from kvant.errors import NotServable
from tests.engine import tiny_chat

ROOT = Path(__file__).resolve().parents[2]


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


def test_every_format_is_read_by_every_backend_and_the_result_becomes_a_table(
    model: Path, text: Path, tmp_path: Path
) -> None:
    data = tmp_path / "docs" / "benchmarks"
    data.mkdir(parents=True)
    out = data / "fp8-quality.json"
    compare_backends.main(
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
    command = [sys.executable, "-m", "benchmarks.tables", "--root", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    lines = readme.read_text().splitlines()
    assert lines[3] == f"| float32 | cpu | - | - | - | {baseline['nll']:.4f} |"
    assert lines[4] == f"| float32 | cpu | 0.00000 | 0.00000 | 100.0 % | {same['nll']:.4f} |"


def test_likelihood_is_that_of_the_formula() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.3, 0.5]]))
    found = compare_backends._nll(logits, [0, 1, 2])
    assert found == pytest.approx(-(torch.tensor([0.25, 0.8]).log().mean().item()))


def test_a_text_that_is_too_short_and_a_backend_that_refuses_are_reported(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(model), "--text", str(text), "--device", "cpu", "--format", "fp8_e4m3", "--tokens"]
    with pytest.raises(SystemExit):
        compare_backends.main([*asked, "500", "--backend", "cpu"])
    assert "--tokens 500" in capsys.readouterr().err
    with pytest.raises(NotServable, match="triton_fp8"):
        compare_backends.main([*asked, "20", "--backend", "triton_fp8"])


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
        compare_backends.main([str(model), *asked, "--tokens", "20", "--defined", *changed])
    assert told in capsys.readouterr().err
