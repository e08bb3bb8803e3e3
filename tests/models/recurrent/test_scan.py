"""Chunks, single tokens and the definition in float64, one token after the other, give the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvant.attention.base import Step
from kvant.kv.dtype import KVDtype
from kvant.kv.geometry import StateGeometry, StateKind
from kvant.kv.spec import StateSpec
from kvant.kv.state_pool import StateCache
from kvant.models.recurrent.conv import causal_conv
from kvant.models.recurrent.elementwise import elementwise_scan
from kvant.models.recurrent.packed import Packed
from kvant.models.recurrent.scan import scan
from tests.attention import driver

LENGTHS = (1, 3, 64, 1, 65, 130, 15, 17, 63)
ROWS = 12
KEY_HEADS, HEADS, KEYS, VALUES = 2, 4, 8, 6


def packed(starts: list[int], lengths: list[int], rows: list[int]) -> Packed:
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    tables = [[1]] * len(rows)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int64)
    step = Step(
        offsets, torch.tensor(ends, dtype=torch.int32), torch.tensor(tables), none, none,
        max(lengths), max(ends), rows=torch.tensor(rows),
        lengths=None if max(lengths) == 1 else tuple(lengths),
    )  # fmt: skip
    return Packed.of(step)


def cache(shape: tuple[int, ...], kind: StateKind = StateKind.RECURRENT) -> StateCache:
    """Rows that hold NaN: a new sequence must not see what was there."""
    spec = StateSpec(StateGeometry(kind, shape), driver.choice(KVDtype.FLOAT32))
    return StateCache(spec, (torch.full((ROWS + 1, *shape), torch.nan),))


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written down, for one sequence in float64."""
    state = torch.zeros(HEADS, VALUES, KEYS, dtype=torch.float64)
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k))
    out = []
    for t in range(len(v)):
        decay = g[t].exp()
        state = state * (decay[:, None, None] if g.ndim == 2 else decay[:, None, :])
        u = v[t]
        if beta is not None:
            u = beta[t][:, None] * (u - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + torch.einsum("hv,hk->hvk", u, k[t])
        out.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(out), state


def inputs(
    count: int, *, by_key: bool, delta: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k = random(count, KEY_HEADS, KEYS), random(count, KEY_HEADS, KEYS)
    k = k / k.norm(dim=-1, keepdim=True)
    g = -3 * torch.rand(count, HEADS, *((KEYS,) if by_key else ()), dtype=torch.float64) ** 4
    beta = torch.rand(count, HEADS, dtype=torch.float64) if delta else None
    return q, k, random(count, HEADS, VALUES), g, beta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("by_key", "delta"), [(False, True), (True, True), (False, False)], ids=["gdn", "kda", "mamba2"]
)
def test_every_way_to_cut_prompts_gives_the_recurrence(
    by_key: bool, delta: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    texts = [inputs(length, by_key=by_key, delta=delta) for length in LENGTHS]
    expected = [one_by_one(*text) for text in texts]
    # float64 numbers pass through float32 states between steps.
    close = {"rtol": 2e-5, "atol": 2e-5}
    for most in (1000, 64, 7, 1):
        states, done = cache((HEADS, VALUES, KEYS)), [0] * len(texts)
        found: list[list[Tensor]] = [[] for _ in texts]
        while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
            left = [i for i, n in enumerate(LENGTHS) if done[i] < n]
            counts = [min(most, LENGTHS[i] - done[i]) for i in left]
            parts = [
                [None if x is None else x[done[i] : done[i] + n].to(dtype) for x in texts[i]]
                for i, n in zip(left, counts, strict=True)
            ]
            q, k, v, g, beta = (
                None if column[0] is None else torch.cat(column)  # type: ignore[arg-type]
                for column in zip(*parts, strict=True)
            )
            assert q is not None and k is not None and v is not None and g is not None  # noqa: PT018
            rows = [2 + i for i in left]
            out = scan(q, k, v, g, beta, states, packed([done[i] for i in left], counts, rows))
            for i, n, piece in zip(left, counts, out.split(counts), strict=True):
                found[i].append(piece)
                done[i] += n
        for i, (out, state) in enumerate(expected):
            torch.testing.assert_close(torch.cat(found[i]).to(torch.float64), out, **close)
            torch.testing.assert_close(states.numbers[2 + i].to(torch.float64), state, **close)


@pytest.mark.parametrize("silu", [False, True])
def test_a_convolution_in_pieces_is_one_over_the_whole_text(silu: bool) -> None:
    torch.manual_seed(4)
    channels, size = 10, 4
    weight, bias = torch.randn(channels, size), torch.randn(channels)
    texts = [torch.randn(length, channels) for length in LENGTHS]
    for most in (1000, 7, 2, 1):
        states = cache((size - 1, channels), StateKind.CONV)
        found: list[list[Tensor]] = [[] for _ in texts]
        for start in range(0, max(LENGTHS), most):
            left = [i for i, n in enumerate(LENGTHS) if start < n]
            counts = [min(most, LENGTHS[i] - start) for i in left]
            x = torch.cat([texts[i][start : start + n] for i, n in zip(left, counts, strict=True)])
            where = packed([start] * len(left), counts, [1 + i for i in left])
            out = causal_conv(x, weight, bias, states, where, silu=silu)
            for i, piece in zip(left, out.split(counts), strict=True):
                found[i].append(piece)
        for text, pieces in zip(texts, found, strict=True):
            padded = torch.cat([torch.zeros(size - 1, channels), text])
            every = torch.stack(
                [(padded[t : t + size].T * weight).sum(1) for t in range(len(text))]
            )
            every = every + bias
            every = every * every.sigmoid() if silu else every
            torch.testing.assert_close(torch.cat(pieces), every, rtol=1e-5, atol=1e-5)


def test_an_elementwise_recurrence_in_pieces() -> None:
    torch.manual_seed(5)
    texts = [(torch.rand(n, 3, 2), torch.randn(n, 3, 2)) for n in LENGTHS]
    for most in (1000, 70, 1):
        states = cache((3, 2))
        found: list[list[Tensor]] = [[] for _ in texts]
        for start in range(0, max(LENGTHS), most):
            left = [i for i, n in enumerate(LENGTHS) if start < n]
            counts = [min(most, LENGTHS[i] - start) for i in left]
            a, b = (
                torch.cat(
                    [texts[i][x][start : start + n] for i, n in zip(left, counts, strict=True)]
                )
                for x in (0, 1)
            )
            where = packed([start] * len(left), counts, left)
            out = torch.empty_like(b)

            def make(there: slice, a: Tensor = a, b: Tensor = b) -> tuple[Tensor, Tensor]:
                return a[there], b[there]

            def use(there: slice, state: Tensor, out: Tensor = out) -> None:
                out[there] = state

            elementwise_scan(make, use, states, where)
            for i, piece in zip(left, out.split(counts), strict=True):
                found[i].append(piece)
        for (a, b), pieces in zip(texts, found, strict=True):
            h, every = torch.zeros(3, 2, dtype=torch.float64), []
            for t in range(len(a)):
                h = a[t].to(torch.float64) * h + b[t]
                every.append(h)
            torch.testing.assert_close(
                torch.cat(pieces).to(torch.float64), torch.stack(every), rtol=1e-5, atol=1e-5
            )
