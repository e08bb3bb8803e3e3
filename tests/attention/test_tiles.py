"""In batch-invariant mode attention gives a query the same bits however its sequence came in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvant.attention.base import AttentionParams
from kvant.attention.reference.backend import ReferenceBackend
from kvant.attention.reference.scores import attend_rows
from kvant.attention.reference.tiles import ROW_TILE, attend_tiles
from kvant.kv.dtype import KVDtype
from tests.attention import driver

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 37},
    "softcap": {"softcap": 15.0},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 300, "sinks": True},
    "unequal sizes": {"head_dim_k": 24, "head_dim_v": 40},
}
LENGTH = ROW_TILE + 70


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def params_of(kind: str) -> AttentionParams:
    given = KINDS[kind]
    sinks = rows(9, 4) if given.get("sinks") else None
    return AttentionParams(0.2, given.get("window"), given.get("softcap", 0.0), sinks)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_compute_what_whole_rows_do(kind: str, causal: bool) -> None:
    params = params_of(kind)
    q, k, v = rows(0, 90, 4, 24).double(), rows(1, LENGTH, 2, 24).double(), rows(2, LENGTH, 2, 40)
    place = LENGTH - 90
    expected = attend_rows(q, k, v.double(), offset=place, causal=causal, params=params)
    found = attend_tiles(q, k, v.double(), first=0, position=place, causal=causal, params=params)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def outputs(kind: str, dtype: KVDtype, chunks: list[int], others: int, *, mode: bool) -> Tensor:
    """Every query's output of one sequence that came in these chunks, beside others of odd lengths."""
    layer = driver.layer(**KINDS[kind])
    pool = driver.pool(driver.plan([layer], dtype), 200)
    backend = ReferenceBackend(batch_invariant=mode)
    pages = list(range(50, 50 + -(-LENGTH // driver.PAGE_SIZE)))
    found, stored = [], 0
    k, v = rows(1, LENGTH, 2, layer.head_dim_k), rows(2, LENGTH, 2, layer.head_dim_v)
    q = rows(3, LENGTH, 4, layer.head_dim_k)
    for chunk in chunks:
        lengths = [5 + 3 * i for i in range(others)] + [chunk]
        tables = [[i + 1] for i in range(others)] + [pages]
        step = driver.step(tables, [*lengths[:-1], stored + chunk], lengths)
        before = sum(lengths[:-1])
        mine = slice(stored, stored + chunk)
        joined = [
            torch.cat((rows(4 + i, before, *x.shape[1:]), x[mine])) for i, x in enumerate((k, v, q))
        ]
        backend.write(pool[0], joined[0], joined[1], step)
        found.append(backend.attend(pool[0], joined[2], step, params_of(kind))[before:])
        stored += chunk
    assert stored == LENGTH
    return torch.cat(found)


CHUNKINGS = {
    "one by one at the end": [LENGTH - 20, *[1] * 20],
    "sevens": [7] * (LENGTH // 7) + ([LENGTH % 7] if LENGTH % 7 else []),
    "sixty-fours": [64] * (LENGTH // 64) + [LENGTH % 64],
}


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_neighbours_change_no_bit(kind: str) -> None:
    dtype = KVDtype.INT8_PER_TOKEN_HEAD
    alone = outputs(kind, dtype, [LENGTH], 0, mode=True)
    for name, chunks in CHUNKINGS.items():
        assert torch.equal(outputs(kind, dtype, chunks, 3, mode=True), alone), name


def test_outside_the_mode_chunks_do_change_bits() -> None:
    dtype = KVDtype.INT8_PER_TOKEN_HEAD
    alone = outputs("plain", dtype, [LENGTH], 0, mode=False)
    found = [
        torch.equal(outputs("plain", dtype, chunks, 3, mode=False), alone)
        for chunks in CHUNKINGS.values()
    ]
    assert not all(found), "these chunks cannot tell the mode from its absence"


@pytest.mark.parametrize("dtype", list(KVDtype), ids=str)
def test_every_format_keeps_its_bits(dtype: KVDtype) -> None:
    alone = outputs("plain", dtype, [LENGTH], 0, mode=True)
    for name, chunks in CHUNKINGS.items():
        assert torch.equal(outputs("plain", dtype, chunks, 2, mode=True), alone), name
