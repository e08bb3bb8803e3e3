"""Every backend counts the values that a format cannot hold."""

from __future__ import annotations

import pytest
import torch

from kvant.attention.cpu.formats import SERVED
from kvant.attention.reference.backend import ReferenceBackend
from kvant.kv.dtype import KVDtype
from tests.attention.saturating import LARGEST, counted

FORMATS = [KVDtype.INT8_PER_TOKEN_HEAD, *LARGEST]


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_planted_outliers_are_counted_by_the_reference(stored: KVDtype) -> None:
    expected = [(1, 2, 0)] if stored in LARGEST else []
    assert counted(ReferenceBackend(), stored, rows=torch.float32) == expected


@pytest.mark.parametrize("stored", [f for f in FORMATS if f in SERVED], ids=str)
def test_planted_outliers_are_counted_on_a_cpu(stored: KVDtype) -> None:
    from kvant.attention.cpu.backend import CpuBackend

    expected = [(1, 2, 0)] if stored in LARGEST else []
    assert counted(CpuBackend(), stored, rows=torch.bfloat16) == expected
