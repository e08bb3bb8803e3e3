"""What the engine's tests share."""

from __future__ import annotations

import pytest
import torch

from kvant.execution.batch_graphs import BatchGraphs


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors: several threads would spend their time waiting for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph held it, for every step that came to be one."""
    found: list[bool] = []
    run = BatchGraphs.run

    def watched(graphs: BatchGraphs, *given: object) -> object:
        logits = run(graphs, *given)  # type: ignore[arg-type]
        found.append(logits is not None)
        return logits

    monkeypatch.setattr(BatchGraphs, "run", watched)
    return found
