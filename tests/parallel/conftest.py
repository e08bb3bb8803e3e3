"""Engines of two ranks on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvant.parallel import ranks
from tests import forked


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks start in milliseconds, except in tests marked `real_processes`; all of them end."""
    start = ranks.spawn if "real_processes" in request.fixturenames else forked.spawn
    has_ranks = False

    def spawn(*given: Any) -> Any:
        nonlocal has_ranks
        has_ranks = True
        return start(*given)

    monkeypatch.setattr(ranks, "spawn", spawn)
    yield
    if has_ranks:  # looking for garbage takes longer than many of these tests
        gc.collect()  # an engine's ranks end with it


@pytest.fixture
def real_processes() -> None:
    """Start ranks as a user's engine does."""
