"""Where pages lie: groups by what layers keep, little padding, no byte used twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.groups import (
    ALIGNMENT,
    MOST_WASTE,
    _cut,
    lay_out,
    longest_sequence,
    most_pages,
    sequences_that_fit,
)
from kvant.kv.pool import Arena, KVPool
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, Scale, ScaleState, Source

FORMATS = [d for d in KVDtype if not d.format.device_only and not d.format.takes_outside_scale]


def layer(
    index: int, window: int | None, k: KVDtype, v: KVDtype, heads: int, head_dim: int,
    shared_with: int | None = None,
) -> LayerSpec:  # fmt: skip
    kind = Attention.FULL if window is None else Attention.SLIDING
    if shared_with is not None:
        kind = Attention.SHARED
    geometry = LayerGeometry(
        index, f"layer {index}", kind, heads, heads, head_dim, head_dim, window=window,
        shared_with=shared_with,
    )  # fmt: skip
    if shared_with is not None:
        return LayerSpec(geometry, None, None, "reference")
    choices = [Choice(d, Source.EXPLICIT, "test", (), Scale(ScaleState.NONE)) for d in (k, v)]
    return LayerSpec(geometry, choices[0], choices[1], "reference")


def plan(*layers: LayerSpec, page_size: int = 16) -> KVPlan:
    return KVPlan(Role.TARGET, "m", ComputeDtype.BFLOAT16, "test", page_size, layers)


def alike(windows: list[int | None], **options: object) -> KVPlan:
    given_ = {"k": KVDtype.BFLOAT16, "v": KVDtype.BFLOAT16, "heads": 2, "head_dim": 64, **options}
    return plan(*(layer(i, w, **given_) for i, w in enumerate(windows)))  # type: ignore[arg-type]


@st.composite
def real_mixes(draw: st.DrawFn) -> KVPlan:
    """Layers of published sizes in any pattern, with formats and heads of their own per window."""
    kept = draw(
        st.lists(st.sampled_from([None, 128, 512, 1024, 4096]), min_size=2, max_size=4, unique=True)
    )
    layers = []
    for window in kept:
        k, v = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(FORMATS))
        heads, head_dim = (
            draw(st.sampled_from([1, 2, 4, 8, 16])),
            draw(st.sampled_from([64, 128, 256])),
        )
        for _ in range(draw(st.integers(1, 48))):
            layers.append(layer(len(layers), window, k, v, heads, head_dim))
    return plan(*layers)


@given(real_mixes())
@settings(max_examples=60, deadline=None)
def test_padding_is_at_most_three_percent_in_any_mix(mixed: KVPlan) -> None:
    layout = lay_out(mixed)
    assert layout.waste <= MOST_WASTE
    assert len(layout.groups) == len({s.geometry.window for s in mixed.layers})
    for group in layout.groups:
        assert group.page_bytes * group.per_superblock == layout.superblock_bytes
        assert group.page_bytes % ALIGNMENT == 0
        assert group.used_bytes <= group.page_bytes
    largest = max(group.used_bytes for group in layout.groups)
    assert layout.superblock_bytes <= 256 * 1.03 * largest


def test_four_kinds_of_far_apart_sizes_fit_into_a_small_superblock() -> None:
    """Pages of 20736, 2464, 2396160 and 362496 bytes: the nearest counts alone pad 6 % of 380 MB."""
    size, counts = _cut((20736, 2464, 2396160, 362496))
    assert all(size % count == 0 for count in counts)
    assert size <= 3 * 2396160


@pytest.mark.parametrize("windows", [[None, 8, 8], [None, None], [8, 24, 8], [8, 8]])
def test_planes_use_every_byte_of_a_page_once(windows: list[int | None]) -> None:
    mixed = plan(
        *(
            layer(i, w, k, v, 2, 64)
            for i, (w, k, v) in enumerate(
                zip(
                    windows,
                    [KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.BFLOAT16, KVDtype.INT4_PER_TOKEN_HEAD],
                    [KVDtype.BFLOAT16, KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.FLOAT16],
                    strict=False,
                )
            )
        )
    )
    layout = lay_out(mixed)
    arena = Arena(layout, 3, torch.device("cpu"))
    pool = KVPool(mixed, arena, device=torch.device("cpu"), scales={})
    for spec in mixed.layers:
        cache = pool[spec.geometry.index]
        group = pool.group_of(spec.geometry.index)
        for plane in (*cache.k, *cache.v):
            assert len(plane) == arena.num_pages(group)
            assert plane.stride(0) * plane.element_size() == cache.page_stride
            assert plane.data_ptr() % ALIGNMENT == 0
    for place, group in enumerate(layout.groups):
        arena.bytes.zero_()
        own = [s for s in mixed.layers if pool.group_of(s.geometry.index) == place]
        for spec in own:
            cache = pool[spec.geometry.index]
            for plane in (*cache.k, *cache.v):
                seen = plane[1].contiguous().view(torch.uint8)
                assert not seen.any(), "two planes share bytes"
                plane[1] = 1
        used = sum(int((piece[1] != 0).sum()) for piece in arena.pieces(place))
        assert used > 0
        others = sum(int((piece[2] != 0).sum()) for piece in arena.pieces(place))
        assert others == 0, "a page reaches into the next one"
        ids: list[list[int]] = [[] for _ in layout.groups]
        ids[place] = [1]
        arena.zero(ids)
        assert not arena.bytes.any(), "a page is cleared whole"
        assert group.window == own[0].geometry.window


def test_one_group_keeps_the_pages_of_a_layer_side_by_side() -> None:
    whole = alike([None, None, None])
    pool = KVPool(whole, 5, device=torch.device("cpu"), scales={})
    assert pool.num_bytes == 5 * whole.page_bytes
    for spec in whole.layers:
        assert pool[spec.geometry.index].page_stride == 16 * spec.bytes_per_token


def test_a_layer_that_others_read_keeps_what_they_need() -> None:
    bf16 = KVDtype.BFLOAT16
    layout = lay_out(
        plan(
            layer(0, 8, bf16, bf16, 2, 64),
            layer(1, None, bf16, bf16, 2, 64, shared_with=0),
            layer(2, 8, bf16, bf16, 2, 64),
            layer(3, 24, bf16, bf16, 2, 64, shared_with=2),
        )
    )
    assert [group.window for group in layout.groups] == [None, 24]


def test_a_window_that_no_sequence_exceeds_makes_no_group() -> None:
    mixed = alike([None, 4096])
    assert len(lay_out(mixed, longest=8192).groups) == 2
    assert len(lay_out(mixed, longest=4096).groups) == 1


@given(
    window=st.integers(1, 40), piece=st.integers(1, 40), size=st.sampled_from([1, 4, 16]),
    length=st.integers(1, 200),
)  # fmt: skip
def test_no_sequence_holds_more_than_is_counted(
    window: int, piece: int, size: int, length: int
) -> None:
    most, start = 0, 0
    while start < length:
        end = min(length, start + piece)
        first = max(0, start - window + 1) // size
        most = max(most, -(-end // size) - first)
        start = end
    assert most <= most_pages(window, length, piece, size)
    assert most_pages(None, length, piece, size) == -(-length // size)


def test_capacity_is_what_sequences_take() -> None:
    layout = lay_out(alike([None, *[512] * 5]))
    longest = longest_sequence(layout, 1000, 256)
    assert longest_sequence(layout, 1000, 256) < longest_sequence(layout, 1001, 256)
    assert sequences_that_fit(layout, 1000, longest, 256) == 1
    assert sequences_that_fit(layout, 1000, longest + 16 * 16, 256) == 0
    few, many = (sequences_that_fit(layout, n, 2048, 256) for n in (1000, 2000))
    assert many >= 2 * few
