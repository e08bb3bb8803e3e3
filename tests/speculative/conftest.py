"""One trained pair for all tests of the room."""

from __future__ import annotations

import pytest
import torch

from tests.speculative.pair import Pair, build_pair


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors: several threads would wait for each other, for minutes where workers share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))
