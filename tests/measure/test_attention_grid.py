"""What `kvant bench attention` does beside the GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.kv.dtype import KVDtype
from kvant.measure.attention_grid import OWN, Timed, _paged, table
from kvant.measure.attention_inputs import Case, Inputs, make_inputs


def stored(x: Inputs) -> torch.Tensor:
    """Keys of every sequence, in order."""
    return x.cache.k[0][x.step.page_table.long()].flatten(1, 2)


def test_a_peer_with_large_pages_reads_the_tokens_that_small_ones_give() -> None:
    case = Case(KVDtype.BFLOAT16, KVDtype.BFLOAT16, (256, 256), kv_heads=2, head_dim=16)
    x = make_inputs(case, torch.device("cpu"))
    small, large = _paged(x, 64)
    assert large.cache.page_size == 64
    assert large.step.page_table.shape == (2, 4)
    assert torch.equal(stored(small), stored(large))
    assert not torch.equal(stored(small), stored(x))


def test_the_table_holds_kvant_against_the_fastest_other() -> None:
    us = {(OWN, 16): 12.0, ("a", 16): 11.0, ("a", 128): 10.0, ("b", 16): 30.0}
    rows = [
        Timed(1, 1024, "bfloat16", who, size, [t], t, 0.0) for (who, size), t in us.items()
    ]  # fmt: skip
    assert table(rows).splitlines()[1].split()[-1] == "1.20"
    assert table(rows[:1]).splitlines()[1].split()[-1] == "-"
