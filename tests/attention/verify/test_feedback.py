"""Writers of keys with error feedback store the bytes of the definition, and read them back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvant.attention.backends import _import
from kvant.attention.cpu.info import INFO as CPU
from kvant.attention.need import Need
from kvant.attention.reference.info import INFO as REFERENCE
from kvant.attention.verify.cells import MASKS, Row, need_of
from kvant.attention.verify.trial import Trial, run_trial
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.plan.device import host_device

HERE = host_device("cpu")
SEQUENCES = ((20, 3), (5, 5), (40, 1))


def need(compute: ComputeDtype, head_dim: int) -> Need:
    row = Row(KVDtype.INT4_FEEDBACK, KVDtype.INT4_PER_TOKEN_HEAD, head_dim)
    return need_of(row, MASKS[0], HERE, compute)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("compute", [ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16], ids=str)
@pytest.mark.parametrize("info", [CPU, REFERENCE], ids=lambda info: info.name)
def test_stored_bytes_are_those_of_the_definition(
    info: object, compute: ComputeDtype, head_dim: int
) -> None:
    torch.set_num_threads(1)
    asked = need(compute, head_dim)
    assert info.refuse(asked) is None  # type: ignore[attr-defined]
    backend = _import(info.name, info.module).backend()  # type: ignore[attr-defined]
    trial = Trial(asked, SEQUENCES, odd_rows=True)
    outcome = run_trial(backend, trial, torch.device("cpu"))
    assert outcome.wrong is None, outcome.wrong


def test_a_writer_without_the_matrices_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial's matrices matter: plain rounding stores other bytes."""
    from kvant.attention.reference import backend as module

    store = module._store

    def without(planes, choice, rows, scale, slots):  # type: ignore[no-untyped-def]
        plain = replace(choice, dtype=KVDtype.INT4_PER_TOKEN_HEAD)
        store(planes, plain, rows, None, slots)

    monkeypatch.setattr(module, "_store", without)
    outcome = run_trial(
        module.backend(), Trial(need(ComputeDtype.FLOAT32, 64), SEQUENCES), torch.device("cpu")
    )
    assert outcome.wrong is not None
    assert "k.codes are stored with other bytes" in outcome.wrong
