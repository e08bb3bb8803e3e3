"""Waiting threads leave the core to the one they wait for."""

from __future__ import annotations

import os

import pytest

from kvant.engine.process import wait_without_spinning


def test_openmp_spins_little_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    wait_without_spinning()
    assert int(os.environ["GOMP_SPINCOUNT"]) <= 10000
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    wait_without_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    wait_without_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
