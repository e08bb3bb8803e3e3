"""Threads of an engine work on the GPU of the thread that starts them."""

from __future__ import annotations

import pytest
import torch

from kvant.engine.device import chosen_gpu, work_on


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
