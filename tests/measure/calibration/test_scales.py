"""Statistics of rows and the scales that are made of them, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant.attention.base import AttentionParams
from kvant.errors import BadValue
from kvant.kv.codecs import codec_for
from kvant.kv.codecs.rotation import rotate
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.measure.calibration.scales import (
    FACTORS,
    Method,
    Sharing,
    candidates,
    check_seen,
)
from kvant.measure.calibration.seen import (
    NUM_BINS,
    LayerSeen,
    SideSeen,
    add_packed,
    bin_edges,
    bin_of,
    pack,
)

HEADS, DIM, TOKENS = 2, 16, 96


def side() -> SideSeen:
    return SideSeen(np.zeros((HEADS, NUM_BINS), np.int64), np.zeros(HEADS))


@pytest.fixture
def rows() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    k = torch.randn(TOKENS, HEADS, DIM) * torch.tensor([3.0, 0.2])[:, None]
    k[5, 0, 3] = 90.0
    v = 0.05 * torch.randn(TOKENS, HEADS, DIM)
    return {"q": torch.randn(TOKENS, 2 * HEADS, DIM), "k": k, "v": v}


@pytest.fixture
def layer(rows: dict[str, torch.Tensor]) -> LayerSeen:
    found = LayerSeen(side(), side(), np.zeros((HEADS, DIM, DIM)), 0, dict(rows))
    found.params = AttentionParams(0.25)
    found.k.add(rows["k"])
    found.v.add(rows["v"])
    return found


@given(st.floats(2.0**-40, 2.0**39, width=32))
def test_a_magnitude_lies_between_the_edges_of_its_bin(size: float) -> None:
    place = int(bin_of(torch.tensor([size]))[0])
    edges = bin_edges()
    assert edges[place] <= size < edges[place + 1]


def test_heads_are_counted_apart_and_broken_numbers_are_told(
    rows: dict[str, torch.Tensor], layer: LayerSeen
) -> None:
    nonzero = int((rows["k"] != 0).sum())
    assert int(layer.k.counts.sum()) == nonzero
    assert layer.k.largest.tolist() == rows["k"].abs().amax((0, 2)).tolist()
    assert layer.k.broken == 0
    broken = rows["k"].clone()
    broken[0, 1, :2] = torch.tensor([torch.nan, -torch.inf])
    layer.k.add(broken)
    assert layer.k.broken == 2
    with pytest.raises(BadValue, match=r"the k_scale of layer 0 \(a\.b\) comes out NaN"):
        check_seen({0: layer}, {0: "a.b"})


def test_a_side_that_is_zero_is_named_with_layer_and_head(layer: LayerSeen) -> None:
    layer.v = side()
    layer.v.add(torch.zeros(4, HEADS, DIM))
    with pytest.raises(BadValue, match=r"the v_scale of layer 7 \(x\) comes out 0 in KV head 0"):
        check_seen({7: layer}, {7: "x"})


def test_kept_parts_add_up_to_the_whole(rows: dict[str, torch.Tensor], layer: LayerSeen) -> None:
    halves = []
    for part in (slice(0, 40), slice(40, None)):
        one = LayerSeen(side(), side(), np.ones((HEADS, DIM, DIM)), 3, {})
        one.k.add(rows["k"][part])
        one.v.add(rows["v"][part])
        if part.start == 0:
            one.sample, one.params = dict(rows), layer.params
        halves.append(pack({0: one}))
    empty = LayerSeen(side(), side(), np.zeros((HEADS, DIM, DIM)), 0, {})
    add_packed({0: empty}, halves)
    assert (empty.k.counts == layer.k.counts).all()
    assert empty.v.largest.tolist() == layer.v.largest.tolist()
    assert (empty.queries, empty.moment.max(), empty.params) == (6, 2.0, layer.params)
    assert torch.equal(empty.sample["q"], rows["q"])


def stored(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codec = codec_for(KVDtype.FP8_E4M3)
    return codec.decode(codec.encode(x, scale), scale, torch.float32)


@pytest.mark.parametrize("sharing", Sharing)
def test_least_error_is_least_by_brute_force(layer: LayerSeen, sharing: Sharing) -> None:
    rows = {
        "k": torch.randn(1000, HEADS, DIM) ** 3
    }  # long tails, and no single number that decides
    layer.k = side()
    layer.k.add(rows["k"])
    made = {one.method: one for one in candidates({0: layer}) if one.sharing is sharing}
    full = made[Method.ABSMAX].scales[0, Side.K]
    heads = rows["k"].abs().amax((0, 2)) / 448
    assert torch.allclose(full, heads if sharing is Sharing.HEAD else heads.amax()[None])
    assert (made[Method.PERCENTILE].scales[0, Side.K] <= full).all()

    def error(scale: torch.Tensor) -> float:
        return float(((stored(rows["k"], scale) - rows["k"]).double() ** 2).sum())

    least = min(error(full * factor) for factor in FACTORS)
    assert error(made[Method.MSE].scales[0, Side.K]) <= 1.1 * least


def test_least_divergence_is_that_of_the_attention(
    rows: dict[str, torch.Tensor], layer: LayerSeen
) -> None:
    made = {one.name: one for one in candidates({0: layer})}

    def divergence(scale: torch.Tensor) -> float:
        total = 0.0
        coded = stored(rows["k"], scale)
        for head in range(2 * HEADS):
            p, other = (
                torch.softmax(
                    (0.25 * rows["q"][:, head].double() @ k[:, head // 2].double().T).masked_fill(
                        torch.ones(TOKENS, TOKENS).triu(1) > 0, -torch.inf
                    ),
                    -1,
                )
                for k in (rows["k"], coded)
            )
            total += float(torch.special.xlogy(p, p / other.clamp(min=1e-300)).nansum())
        return total

    full = made["absmax per tensor"].scales[0, Side.K]
    tried = [divergence(full * factor) for factor in FACTORS]
    best = divergence(made["kl per tensor"].scales[0, Side.K])
    assert best == pytest.approx(min(tried), rel=1e-3)


def test_moments_are_those_of_rotated_queries(rows: dict[str, torch.Tensor]) -> None:
    from kvant.measure.calibration.seen import SeeingBackend
    from tests.measure.calibration.fakes import Nothing, cache_of, step_of

    seen = {0: LayerSeen(side(), side(), np.zeros((HEADS, DIM, DIM)), 0, {})}
    backend = SeeingBackend(Nothing(), seen)
    backend.write(cache_of(HEADS, DIM), rows["k"], rows["v"], step_of(TOKENS))
    backend.attend(cache_of(HEADS, DIM), rows["q"], step_of(TOKENS), AttentionParams(0.25))
    for head in range(HEADS):
        q = rotate(rows["q"][:, 2 * head : 2 * head + 2].reshape(-1, DIM)).double()
        assert seen[0].moment[head] == pytest.approx((q.T @ q).numpy(), rel=1e-5)
    assert seen[0].queries == 2 * TOKENS
    assert torch.equal(seen[0].sample["q"], rows["q"])
