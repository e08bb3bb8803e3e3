"""Torch's threads, and what is said where there are none for our loops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvant.kernels.cpu import threads


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    threads.parallel_address.cache_clear()
    yield
    threads.parallel_address.cache_clear()


@pytest.mark.parametrize(("count", "said"), [(4, 1), (1, 0)])
def test_loops_that_must_do_with_one_thread_say_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int, said: int
) -> None:
    monkeypatch.setattr(threads, "openmp_address", lambda name: 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert threads.parallel_address() == threads.parallel_address() == 0
    assert len(caplog.records) == said


def test_torchs_own_threads_are_found_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert threads.parallel_address()
    assert not caplog.records
