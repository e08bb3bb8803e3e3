"""Random weights for timings are finite, with any earlier contents of the memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvant.attention.hook import register
from kvant.models.load import _make_weights
from tests.models import tiny


@pytest.fixture
def _memory_holds_nan() -> Iterator[None]:
    """Inside, torch fills memory without a value with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_memory_holds_nan")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_number_is_finite(family: str) -> None:
    register()
    config = tiny.config_of(family)
    module = _make_weights(config, torch.float32, torch.device("cpu"), None)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert bool(tensor.isfinite().all()), name
