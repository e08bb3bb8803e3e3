"""A process that steps an engine: its threads wait without spinning, and its imports are not searched."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from kvant.engine.process import importing, wait_without_spinning


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


@pytest.mark.parametrize("owns_process", [False, True])
def test_no_garbage_is_collected_while_modules_are_imported(
    owns_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with importing(owns_process=owns_process):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [False] * owns_process  # frozen before a collection can search them


def test_garbage_is_collected_as_the_program_says_if_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", sys)
    with importing(owns_process=True):
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "transformers")
    gc.disable()
    try:
        with importing(owns_process=False):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
