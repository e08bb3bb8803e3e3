"""Masks, soft cap and sinks by their plain definition, one query, head and key at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvant.attention.base import AttentionParams
from kvant.attention.reference.scores import attend_rows, visible


def plainly_sees(query: int, key: int, *, causal: bool, window: int | None) -> bool:
    if causal and key > query:
        return False
    return window is None or abs(query - key) < window


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, offset: int, causal: bool, params: AttentionParams
) -> Tensor:
    """exp(score) over the sum of exp of all visible scores and the head's sink."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            total = 0.0 if params.sinks is None else math.exp(float(params.sinks[head]))
            weighted = torch.zeros(v.shape[2], dtype=torch.float64)
            for j in range(k.shape[0]):
                if not plainly_sees(offset + i, j, causal=causal, window=params.window):
                    continue
                score = float(q[i, head] @ k[j, head // group]) * params.scale
                if params.softcap:
                    score = params.softcap * math.tanh(score / params.softcap)
                total += math.exp(score)
                weighted += math.exp(score) * v[j, head // group]
            out[i, head] = weighted / total
    return out


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_scores_are_their_definition(
    causal: bool, window: int | None, softcap: float, with_sinks: bool
) -> None:
    made = torch.Generator().manual_seed(1)
    q = torch.randn(5, 6, 8, generator=made, dtype=torch.float64)
    k = torch.randn(11, 2, 8, generator=made, dtype=torch.float64)
    v = torch.randn(11, 2, 4, generator=made, dtype=torch.float64)
    sinks = torch.randn(6, generator=made, dtype=torch.float64) if with_sinks else None
    params = AttentionParams(0.7, window, softcap, sinks)
    found = attend_rows(q, k, v, offset=6, causal=causal, params=params)
    expected = plain_attention(q, k, v, offset=6, causal=causal, params=params)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [None, *range(1, 9)])
@pytest.mark.parametrize(
    ("n", "m", "offset"), [(1, 1, 0), (1, 6, 5), (3, 6, 3), (6, 6, 0), (2, 6, 1)]
)
def test_no_mask_is_built_exactly_where_every_query_sees_every_row(
    n: int, m: int, offset: int, causal: bool, window: int | None
) -> None:
    mask = visible(n, m, offset=offset, causal=causal, window=window, device=torch.device("cpu"))
    expected = [
        [plainly_sees(offset + i, j, causal=causal, window=window) for j in range(m)]
        for i in range(n)
    ]
    if mask is None:
        assert all(all(row) for row in expected)
    else:
        assert mask.tolist() == expected
        assert not all(all(row) for row in expected)
