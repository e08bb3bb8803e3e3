"""Threads of an engine work on the GPU of the thread that starts them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvant.plan import device
from kvant.plan.device import chosen_gpu, host_device, work_on


def test_a_thread_takes_over_the_gpu_that_another_one_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    work_on(chosen_gpu())
    assert taken == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    work_on(chosen_gpu())
    assert taken == [1]


def test_a_plan_is_made_for_the_gpu_that_was_chosen_not_for_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    older, newer = SimpleNamespace(major=8, minor=0), SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(device, "_ACCELERATOR_NODES", (tmp_path,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    # The second one is this thread's.
    found = {0: older, 1: newer, None: newer}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=None: found[index])
    assert host_device("auto").arch == "sm_90"
