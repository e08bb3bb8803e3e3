"""What the engine's tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors: several threads would spend their time waiting for each other."""
    torch.set_num_threads(1)
