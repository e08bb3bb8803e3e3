"""What the engine's tests share."""

from __future__ import annotations

import pytest
import torch

from kvant.execution.graphs import MixedGraphs


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors: several threads would spend their time waiting for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph held it, for every step that came to be one."""
    found: list[bool] = []
    run = MixedGraphs.run

    def watched(graphs: MixedGraphs, *given: object) -> object:
        is_held = run(graphs, *given)  # type: ignore[arg-type]
        found.append(bool(is_held))
        return is_held

    monkeypatch.setattr(MixedGraphs, "run", watched)
    return found
