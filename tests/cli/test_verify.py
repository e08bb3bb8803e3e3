"""`kvant verify`: what a user sees of the support matrix, and when it says no."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from kvant.attention.cpu.backend import CpuBackend
from kvant.cli.main import app
from kvant.errors import BadValue

ARGUMENTS = ("verify", "--device", "cpu", "--jobs", "1")
ONE = (*ARGUMENTS, "--kv-cache-dtype", "fp8/int8_per_token_head", "--head-size", "64")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_cell_that_holds_shows_its_error_and_a_refused_one_its_reason() -> None:
    result = run(*ONE)
    assert result.exit_code == 0, result.output
    assert "### Backend `cpu`" in result.stdout
    assert re.search(
        r"^\| `fp8_e4m3/int8_per_token_head` \|( \d\.\de-0\d \|){4}$", result.stdout, re.M
    )
    assert "Refuses everything: Triton compiles for GPUs only." in result.stdout
    assert "Not verified yet" not in result.stdout  # the other combinations were not asked for
    assert "do not edit" not in result.stdout


def test_json_has_a_number_for_every_mask_and_number_of_queries() -> None:
    result = run(*ONE, "--backend", "cpu", "--format", "json")
    (device,) = json.loads(result.stdout)["runs"]
    masks = device["backends"]["cpu"]["formats"]["fp8_e4m3/int8_per_token_head"]["64"]
    assert {len(cells) for cells in masks.values()} == {3}
    assert len(masks) == 4
    assert all(0 < error < 5e-5 for cells in masks.values() for error in cells)


def test_a_cell_that_does_not_hold_is_named_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = CpuBackend.attend

    def wrong(self: CpuBackend, cache: Any, q: Tensor, step: Any, params: Any) -> Tensor:
        if step.max_seqlen_q == 16 and not step.causal:
            raise RuntimeError("no such kernel\nsecond line")
        return attend(self, cache, q, step, params)

    monkeypatch.setattr(CpuBackend, "attend", wrong)
    result = run(*ONE, "--backend", "cpu")
    assert result.exit_code == 1
    assert "| FAILED |" in result.stdout
    assert "non-causal, window, 16 queries: RuntimeError: no such kernel" in result.output
    assert "second line" not in result.output


def test_a_part_of_the_matrix_is_not_recorded_as_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "support.json"
    result = run(*ONE, "--record", str(path))
    assert isinstance(result.exception, BadValue)
    assert not path.exists()
    assert run(*ONE, "--format", "json").exit_code == 0


def test_a_request_that_depends_on_a_model_is_no_format() -> None:
    result = run(*ARGUMENTS, "--kv-cache-dtype", "auto")
    assert isinstance(result.exception, BadValue)


def test_several_processes_find_what_one_finds() -> None:
    alone = run(*ONE, "--backend", "reference", "--format", "json")
    several = run("verify", "--device", "cpu", "--jobs", "2", *ONE[5:], "--backend", "reference",
                  "--format", "json")  # fmt: skip
    found = [json.loads(r.stdout)["runs"][0]["backends"]["reference"] for r in (alone, several)]
    assert found[0]["formats"].keys() == found[1]["formats"].keys()


def test_products_of_weights_are_verified_in_every_format_and_way() -> None:
    result = run("verify", "--device", "cpu", "--weights", "--format", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert all(cell["right"] for cell in found)
    rounded = {"bfloat16 activations and results"}
    assert all(max(cell["errors"]) < 1e-5 for cell in found if cell["way"] not in rounded)
    ways = {(cell["format"], cell["way"]) for cell in found}
    assert ("GGUF Q6_K", "exact activations") in ways
    assert ("int8, a scale per output", "int8 activations") in ways
    assert ("bfloat16", "bfloat16 activations and results") in ways


@pytest.mark.parametrize("option", [("--backend", "cpu"), ("--batch-invariant",)])
def test_options_of_attention_are_refused_for_products(option: tuple[str, ...]) -> None:
    with pytest.raises(BadValue, match=f"{option[0]} has no effect here"):
        CliRunner().invoke(app, ["verify", "--weights", *option], catch_exceptions=False)


def test_formats_of_gpus_are_verified_in_every_way() -> None:
    from kvant.models.fused.verify import verify_experts
    from kvant.weights.verify import verify_products

    here = torch.device("cpu"), torch.float32
    found = [*verify_products(*here), *verify_experts(*here)]
    assert all(cell.is_right for cell in found)
    ways = {(cell.name, cell.way) for cell in found}
    assert ("fp8_e4m3, a scale per output", "rounded activations") in ways
    assert ("int4, a scale per 128 inputs and a zero point", "batch-invariant") in ways
    assert ("experts, fp8_e4m3, a scale per 128 x 128", "rounded activations") in ways


def test_a_wrong_product_is_named_and_the_exit_code_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvant.models.cpu import verify

    class Off(verify.Linear):
        def __call__(self, x: Tensor, *, to_bf16: bool = False) -> Tensor:
            return 1.001 * super().__call__(x, to_bf16=to_bf16)

    monkeypatch.setattr(verify, "Linear", Off)
    result = run("verify", "--device", "cpu", "--weights")
    assert result.exit_code == 1
    assert "FAILED int8, a scale per output, exact activations" in result.stderr
