"""The helpers of GPU tests, on a machine without one."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.gpu import waiting_is_an_error


def test_the_mode_is_reset_and_only_its_own_warning_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all",
            stacklevel=2,
        )

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(UserWarning, match="another"), waiting_is_an_error():
        warnings.warn("another", stacklevel=2)
    assert modes == ["error", "default"]
