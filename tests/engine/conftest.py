"""Every engine that a test of this room makes is audited when the test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvant.engine.engine import Engine


@pytest.fixture(autouse=True)
def audited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Engine] = []
    init = Engine.__init__

    def remember(self: Engine, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", remember)
    yield
    for engine in made:
        engine.audit()
        if not engine.has_work:
            assert engine.stats.num_held_pages == 0, "pages were not given back"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors: several threads would spend their time waiting for each other."""
    torch.set_num_threads(1)
