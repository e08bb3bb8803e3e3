"""`kvant plan` with fp8 products asked for: who serves, what it says of them, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant.attention.flashinfer import info as flashinfer_info
from kvant.attention.triton_fp8.info import INFO
from kvant.errors import NotServable
from tests.acceptance.models import GEMMA3, config, write_model
from tests.acceptance.plan_driver import plan

ASKED = ("--device", "sm_90", "--attention-backend", INFO.name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    body = config(hidden_size=1024, num_attention_heads=8, head_dim=128)
    return write_model(tmp_path / "m", body)


def test_a_plan_says_in_words_that_queries_and_probabilities_are_rounded(model: Path) -> None:
    body = plan(model, *ASKED, "--kv-cache-dtype", "fp8")
    assert {layer["backend"] for layer in body["target"]["layers"]} == {INFO.name}
    assert any("four significant bits" in line for line in body["warnings"])


def test_unasked_nothing_is_rounded_and_nothing_is_said(model: Path) -> None:
    body = plan(model, "--device", "sm_90", "--kv-cache-dtype", "fp8")
    assert {layer["backend"] for layer in body["target"]["layers"]} == {"triton"}
    assert not any("four significant bits" in line for line in body["warnings"])


@pytest.mark.parametrize("name", ["bfloat16", "int8_per_token_head", "fp8/int4_per_token_head"])
def test_other_formats_are_refused_and_the_way_out_is_a_plan(model: Path, name: str) -> None:
    with pytest.raises(NotServable) as refused:
        plan(model, *ASKED, "--kv-cache-dtype", name)
    ways = [way.arguments for way in refused.value.ways_out if way.arguments]
    assert ("--attention-backend", "auto") in ways
    plan(model, *ASKED[:2], *ways[0], "--kv-cache-dtype", name)


def test_a_model_with_windows_is_refused_with_the_window(tmp_path: Path) -> None:
    model = write_model(tmp_path / "g", {**GEMMA3, "head_dim": 128})
    with pytest.raises(NotServable, match=f"this layer's is {GEMMA3['sliding_window']}"):
        plan(model, *ASKED, "--kv-cache-dtype", "fp8")


@pytest.mark.parametrize(
    ("backend", "stored"), [(INFO.name, ("--kv-cache-dtype", "fp8")), ("flashinfer", ())]
)
def test_a_float32_model_is_refused_and_computing_in_bfloat16_is_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, stored: tuple[str, ...]
) -> None:
    monkeypatch.setattr(flashinfer_info, "_refuse_package", lambda: None)
    body = config(hidden_size=1024, num_attention_heads=8, head_dim=128, dtype="float32")
    model = write_model(tmp_path / "f", body)
    asked = ("--device", "sm_90", "--attention-backend", backend, *stored)
    with pytest.raises(NotServable) as refused:
        plan(model, *asked)
    (way,) = (way.arguments for way in refused.value.ways_out if way.arguments[0] == "--dtype")
    layers = plan(model, *asked, *way)["target"]["layers"]
    assert {layer["backend"] for layer in layers} == {backend}


@pytest.mark.parametrize("name", ["int8_per_token_head", "float32"])
def test_bfloat16_is_no_way_out_where_the_format_is_refused_too(tmp_path: Path, name: str) -> None:
    body = config(hidden_size=1024, num_attention_heads=8, head_dim=128, dtype="float32")
    model = write_model(tmp_path / "f", body)
    with pytest.raises(NotServable) as refused:
        plan(model, *ASKED, "--kv-cache-dtype", name)
    assert all("--dtype" not in way.arguments for way in refused.value.ways_out)
