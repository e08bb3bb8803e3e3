"""`kvant plan` says what a format costs on models that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvant.cli.expected_kl import _MEASURED
from tests.acceptance.models import LLAMA, write_model
from tests.cli.command import kvant

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ("--kv-cache-dtype", "int4_per_token_head"),
            "divergence: 0.059 nats, measured on SmolLM2",
        ),
        (("--kv-cache-dtype", "fp8/int4_per_token_head"), "divergence: not measured; kvant eval"),
        ((), None),
    ],
)
def test_the_demo_model_was_measured_in_uniform_formats(
    asked: tuple[str, ...], said: str | None
) -> None:
    shown = kvant("plan", "smollm2", *asked).out
    assert ("expected KL" in shown) == (said is not None)
    assert said is None or said in shown


def test_another_model_was_not_measured(tmp_path: Path) -> None:
    model = write_model(tmp_path / "other", LLAMA)
    shown = kvant("plan", model, "--kv-cache-dtype", "int4_per_token_head").out
    assert "expected KL divergence: not measured; kvant eval measures it" in shown


def test_shipped_figures_are_those_of_the_recorded_measurements() -> None:
    tuned = json.loads((BENCHMARKS / "smollm2-tune.json").read_text())
    (found,) = json.loads(_MEASURED.read_text()).values()
    for name, one in tuned["uniform"].items():
        assert found["formats"][name]["kld_mean"] == round(one["kld_mean"], 6)
