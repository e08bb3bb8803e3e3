"""In batch-invariant mode only backends that promise it are chosen, and each other one says why not."""

from __future__ import annotations

import pytest

from kvant.attention import select
from kvant.attention.need import BackendInfo, DeviceFacts, DeviceKind, Need
from kvant.kv.dtype import ComputeDtype, KVDtype
from tests.attention import driver

PROMISES = BackendInfo("promises", "nowhere", lambda need: None, batch_invariant=True)
DOES_NOT = BackendInfo("does-not", "nowhere", lambda need: None)


def need(*, batch_invariant: bool) -> Need:
    layer = driver.layer()
    dtype = KVDtype.FLOAT32
    return Need(
        layer, dtype, dtype, ComputeDtype.FLOAT32, 16, DeviceFacts(DeviceKind.CPU), batch_invariant
    )


def test_the_mode_passes_over_a_faster_backend_that_does_not_promise_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "BACKENDS", (DOES_NOT, PROMISES))
    assert select.select(need(batch_invariant=False)).backend == "does-not"
    served = select.select(need(batch_invariant=True))
    assert served.backend == "promises"
    assert "--batch-invariant" in served.rejected[0].reason


def test_a_backend_asked_for_by_name_that_does_not_promise_the_mode_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "BACKENDS", (DOES_NOT, PROMISES))
    served = select.select(need(batch_invariant=True), only=DOES_NOT)
    assert not served.is_served
    assert any("--batch-invariant" in r.reason for r in served.rejected)
