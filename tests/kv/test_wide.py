"""Which layers store rows twice, what pages those take, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvant.errors import BadValue
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.dtype import Follow, KVDtype
from kvant.kv.groups import Owner, bytes_per_token_at, lay_out, most_pages
from kvant.kv.names import FormatRequest
from kvant.kv.pool import Arena, KVPool
from kvant.kv.request import AskedWide, KVRequest, Selector, WideRule, parse_rule
from kvant.kv.resolve import resolve
from kvant.kv.spec import KVPlan, Role
from kvant.kv.wide import SINK_TOKENS, ask_wide
from tests.kv.test_resolve import NUM_LAYERS, around, asks, geometry

INT4, MODEL = KVDtype.INT4_PER_TOKEN_HEAD, FormatRequest(Follow.MODEL, Follow.MODEL)


def planned(
    k: KVDtype | Follow = INT4, *rules: str, recent: int = 128, stored: FormatRequest | None = None
) -> KVPlan:
    """Layers 0, 2 and 4 keep every token, the others a window; they compute in bfloat16."""
    wide = ask_wide(None, recent, stored, asked_by="--kv-recent-tokens 128")
    request = KVRequest(explicit=(asks(k),), wide=wide)
    for rule in rules:
        request = request.merged(parse_rule(rule, asked_by="test").target)
    return resolve(request, CheckpointKV(), geometry(), around())


def test_narrow_layers_of_every_token_get_wide_rows_and_no_others() -> None:
    plan = planned(INT4, "2:model")
    assert [layer.geometry.index for layer in plan.layers if layer.wide is not None] == [0, 4]
    wide = plan.layers[0].wide
    assert wide is not None
    assert (wide.sink, wide.recent, wide.k.dtype) == (SINK_TOKENS, 128, KVDtype.BFLOAT16)
    assert str(wide) == "first 16 and last 128 in bfloat16"
    assert "--kv-recent-tokens" in wide.k.because


def test_a_rule_counts_instead_of_the_request_for_all_layers() -> None:
    wide = ask_wide(None, 128, None, asked_by="policy")
    assert wide is not None
    request = KVRequest(
        explicit=(asks(INT4),),
        wide=wide,
        wide_rules=(rule_of(2, replace(wide, recent=32)), rule_of(4, None)),
    )
    plan = resolve(request, CheckpointKV(), geometry(), around())
    found = {layer.geometry.index: layer.wide.recent for layer in plan.layers if layer.wide}
    assert found == {0: 128, 2: 32}
    with pytest.raises(BadValue, match="'1' selects no layer that can store wide rows") as fault:
        resolve(
            KVRequest(explicit=(asks(INT4),), wide_rules=(rule_of(1, wide),)),
            CheckpointKV(), geometry(), around(),
        )  # fmt: skip
    assert fault.value.ways_out
    both = (rule_of(0, wide), rule_of(0, None))
    with pytest.raises(BadValue, match="disagree"):
        resolve(KVRequest(wide_rules=both), CheckpointKV(), geometry(), around())


def rule_of(layer: int, wide: AskedWide | None) -> WideRule:
    return WideRule(Selector(str(layer), first=layer, last=layer), wide, "policy")


def test_wide_rows_of_wide_layers_have_no_effect_and_the_plan_says_so() -> None:
    plan = planned(Follow.MODEL)
    assert not plan.has_wide_rows
    assert any("has no effect" in line for line in plan.warnings)


def test_the_fingerprint_tells_which_tokens_are_wide() -> None:
    found = {planned(recent=n).fingerprint for n in (0, 64, 128)}
    found.add(
        planned(stored=FormatRequest(KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.BFLOAT16)).fingerprint
    )
    assert len(found) == 4


@pytest.mark.parametrize(
    "narrow", [INT4, KVDtype.FP8_E4M3, KVDtype.TURBOQUANT_V3, Follow.CHECKPOINT]
)
def test_wide_rows_have_formats_that_are_wide(narrow: KVDtype | Follow) -> None:
    with pytest.raises(BadValue, match="wide rows cannot be") as fault:
        planned(stored=FormatRequest(narrow, Follow.MODEL))
    assert fault.value.ways_out


def test_first_tokens_alone_are_refused_with_a_way_out() -> None:
    with pytest.raises(BadValue, match="no recent tokens") as fault:
        ask_wide(4, 0, None, asked_by="--kv-sink-tokens 4")
    assert fault.value.ways_out[0].arguments == ("--kv-recent-tokens", "128")
    assert ask_wide(0, 0, None, asked_by="") is None


def test_wide_rows_lie_in_a_group_of_their_own_and_share_no_byte() -> None:
    plan = planned()
    layout = lay_out(plan)
    assert [(g.window, g.sink) for g in layout.groups] == [(None, 0), (128, 0), (128, SINK_TOKENS)]
    wide = layout.groups[2]
    assert set(wide.pieces) == {Owner(Role.TARGET, i, is_wide=True) for i in (0, 2, 4)}
    pool = KVPool(
        plan, Arena(layout, 4, torch.device("cpu")), device=torch.device("cpu"), scales={}
    )
    cache = pool[2]
    assert cache.wide is not None
    assert (pool.group_of(2), cache.wide_group) == (0, 2)
    assert [plane.dtype for plane in cache.wide.k] == [torch.bfloat16]
    marked = pool.arena.bytes.clone()
    page = wide.per_superblock  # the first page of the second superblock
    for index in (0, 2, 4):
        rows = pool[index].wide
        assert rows is not None
        rows.k[0][page] = rows.v[0][page] = 1.0
    changed = (pool.arena.bytes != marked).nonzero().flatten()
    assert changed.numel() == wide.used_bytes, "two bytes of every number"
    assert changed.min() >= layout.superblock_bytes
    assert changed.max() < layout.superblock_bytes + wide.page_bytes


def test_bytes_of_a_sequence_count_its_wide_pages() -> None:
    plan = planned()
    narrow = plan.bytes_per_token
    wide = 3 * 2 * 2 * 64 * 2  # layers, heads, sides, numbers, bytes
    pages = most_pages(128, 8192, 1, 16, SINK_TOKENS)
    assert pages == 9 + 1
    assert bytes_per_token_at(plan, 8192) == narrow + pages * 16 * wide / 8192
    assert bytes_per_token_at(plan, 16) == narrow + wide
    assert bytes_per_token_at(planned(recent=0), 16) == narrow


def test_first_pages_count_beside_a_window() -> None:
    assert most_pages(128, 10_000, 1, 16, 4) == most_pages(128, 10_000, 1, 16) + 1
    assert most_pages(128, 40, 1, 16, 4) == 3
    assert most_pages(None, 40, 1, 16) == 3


def test_layers_without_every_token_refuse_wide_rows() -> None:
    import dataclasses

    shape = geometry()
    sliding = tuple(layer for layer in shape.layers if layer.window is not None)
    wide = ask_wide(None, 64, None, asked_by="--kv-recent-tokens 64")
    with pytest.raises(BadValue, match="can store wide rows"):
        resolve(
            KVRequest(explicit=(asks(INT4),), wide=wide), CheckpointKV(),
            dataclasses.replace(shape, layers=sliding), around(),
        )  # fmt: skip
    assert len(sliding) == NUM_LAYERS // 2
