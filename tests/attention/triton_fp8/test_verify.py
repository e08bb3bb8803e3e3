"""`kvant verify` and the check at start ask for rounding where a backend rounds, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant.attention.need import BackendInfo, DeviceFacts, DeviceKind
from kvant.attention.triton.info import INFO as TRITON
from kvant.attention.triton_fp8.info import INFO as TRITON_FP8
from kvant.attention.verify import matrix, start
from kvant.attention.verify.cells import MASKS, Row
from kvant.attention.verify.trial import Outcome, Trial
from kvant.kv.dtype import ComputeDtype, KVDtype
from tests.attention import driver

HOPPER = DeviceFacts(DeviceKind.CUDA, "sm_90")
E4M3 = KVDtype.FP8_E4M3
BOTH = pytest.mark.parametrize("info", [TRITON, TRITON_FP8], ids=lambda info: info.name)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    trials: list[Trial] = []

    def run_trial(backend: Any, trial: Trial, device: torch.device) -> Outcome:
        trials.append(trial)
        return Outcome(0.0, 1.0, None)

    monkeypatch.setattr(start, "run_trial", run_trial)
    monkeypatch.setattr(matrix, "run_trial", run_trial)
    return trials


@BOTH
def test_at_start(info: BackendInfo, held: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(name=info.name)
    monkeypatch.setattr(start, "load_backends", lambda *_, **__: (made,))
    monkeypatch.setattr(start, "_compile", lambda trials, device: None)
    plan = driver.plan([driver.layer(head_dim_k=64)], E4M3, compute=ComputeDtype.BFLOAT16)
    layers = tuple(replace(layer, backend=info.name) for layer in plan.layers)
    start.verify_plan(replace(plan, layers=layers), HOPPER)
    assert any(new >= 256 for trial in held for _, new in trial.sequences)
    assert {trial.rounds_long for trial in held} == {info.rounds_long}


@BOTH
def test_in_the_matrix(
    info: BackendInfo, held: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(backend=lambda: SimpleNamespace(name=info.name))
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    asked = matrix.Asked(info, Row(E4M3, E4M3, 128), HOPPER, ComputeDtype.BFLOAT16)
    answer = matrix.verify_row(asked)
    served = [mask for mask in MASKS if not isinstance(answer[mask], str)]
    assert len(served) == (2 if info.rounds_long else 4)
    assert {trial.rounds_long for trial in held} == {info.rounds_long}
