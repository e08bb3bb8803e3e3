"""`kvant plan` says what a format costs on models that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvant.cli.expected_kl import _MEASURED
from kvant.kv.transfer.measured import MEASURED
from tests.acceptance.models import LLAMA, config, write_model
from tests.cli.command import kvant

QWEN3 = config(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ("--kv-cache-dtype", "int4_per_token_head"),
            "divergence: 0.059 nats, measured on SmolLM2",
        ),
        (("--kv-cache-dtype", "fp8/int4_per_token_head"), "divergence: not measured; kvant eval"),
        (
            ("--kv-cache-dtype", "int4_per_token_head", "--kv-recent-tokens", "200"),
            "0.0041 nats, measured on SmolLM2-135M-Instruct with the first 16 and the last 128 rows wide",
        ),
        (
            ("--kv-cache-dtype", "int4_per_token_head", "--kv-recent-tokens", "20"),
            "divergence: not measured",
        ),
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
        assert found["formats"][name]["same_top"] == round(one["same_top"], 4)
    runs = json.loads((BENCHMARKS / "wide-rows.json").read_text())["runs"]
    # A plan's advice supposes wide rows in bfloat16, and the model as it is published.
    exact = [
        run
        for run in runs
        if run["wide_rows_in"] == "bfloat16" and "--hf-overrides" not in run["command"]
    ]
    measured = [row for run in exact for row in run["rows"] if row["rows"] != "0+0"]
    shipped = [one for rows in found["wide"].values() for one in rows]
    assert sorted(one["kld_mean"] for one in shipped) == sorted(
        round(row["kld_mean"], 6) for row in measured
    )


def test_what_conversions_lose_is_shown_where_it_was_measured() -> None:
    recorded = json.loads((BENCHMARKS / "smollm2-conversions.json").read_text())
    (found,) = json.loads(MEASURED.read_text()).values()
    kl = {(row["source"], row["target"]): row["kld_mean"] for row in recorded["rows"]}
    for (source, target), mean in kl.items():
        assert found["kld_mean"][source][target] == round(mean, 6)
    transfer = ("--kv-offload", "host:1MiB", "--kv-transfer", "take:127.0.0.1:5700")
    asked = (*transfer, "--kv-transfer-convert", "fp8_per_token_head,nvfp4")
    shown = kvant("plan", "smollm2", "--kv-cache-dtype", "int4_per_token_head", *asked).out
    pair = kl["fp8_per_token_head", "int4_per_token_head"]
    assert f"of the conversion: {pair:.2g}, measured on SmolLM2-135M-Instruct" in shown
    assert "pages of nvfp4 become int4_per_token_head: KL divergence: not measured" in shown
    assert "become" not in kvant("plan", "smollm2", *transfer).out


@pytest.mark.parametrize(
    ("family", "asked", "warned"),
    [
        (LLAMA, ("--kv-cache-dtype", "int4_per_token_head"), "87% of its most likely tokens"),
        (
            LLAMA,
            ("--kv-cache-dtype", "turboquant_k3/turboquant_v3", "--kv-format-defaults", "off"),
            "keys of 3 bits",
        ),
        (LLAMA, ("--kv-cache-dtype", "int8_per_token_head/int4_per_token_head"), None),
        (
            LLAMA,
            ("--kv-cache-dtype", "int4_per_token_head", "--kv-recent-tokens", "128"),
            None,
        ),
        (QWEN3, ("--kv-cache-dtype", "int4_per_token_head"), None),
    ],
)
def test_narrow_keys_without_norms_are_warned_of_with_a_number(
    family: object, asked: tuple[str, ...], warned: str | None, tmp_path: Path
) -> None:
    shown = kvant("plan", write_model(tmp_path / "model", family), *asked).out
    assert ("without norms of queries and keys" in shown) == (warned is not None)
    assert warned is None or warned in shown
