"""Which layers store rows twice, what pages those take, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvant.errors import BadValue, ConfigError
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.dtype import Follow, KVDtype
from kvant.kv.format import Side
from kvant.kv.groups import (
    Owner,
    bits_per_value_at,
    bytes_per_token_at,
    depends_on_length,
    kept_tokens,
    lay_out,
    most_pages,
)
from kvant.kv.names import SideRequests, parse_sides
from kvant.kv.pool import Arena, KVPool
from kvant.kv.request import AskedWide, KVRequest, Selector, WideRule, parse_rule
from kvant.kv.resolve import resolve
from kvant.kv.spec import KVPlan, Role
from kvant.kv.wide import SINK_TOKENS, ask_wide
from tests.kv.test_resolve import NUM_LAYERS, around, asks, geometry

INT4 = KVDtype.INT4_PER_TOKEN_HEAD


def planned(
    k: KVDtype | Follow = INT4, *rules: str, recent: int = 128, stored: SideRequests | None = None
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
    assert {choice.dtype for choice in wide.sides.values()} == {KVDtype.BFLOAT16}
    assert (wide.sink, wide.recent) == (SINK_TOKENS, 128)
    assert str(wide) == "first 16 and last 128 in bfloat16"
    assert "--kv-recent-tokens" in wide.because


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
        planned(stored=SideRequests(KVDtype.FP8_PER_TOKEN_HEAD, KVDtype.BFLOAT16)).fingerprint
    )
    found |= {planned(stored=one_side(side)).fingerprint for side in "kv"}
    assert len(found) == 6


def one_side(side: str) -> SideRequests:
    return parse_sides(f"{side}=model", asked_by="test")


@pytest.mark.parametrize("side", ["k", "v"])
def test_one_side_alone_is_wide_and_the_other_lies_beside_it_as_it_is(side: str) -> None:
    plan = planned(stored=one_side(side))
    spec = plan.layers[0]
    assert spec.wide is not None
    assert [str(one.value) for one in spec.wide.sides] == [side]
    assert str(spec.wide) == f"first 16 and last 128 of {side.upper()} in bfloat16"
    assert spec.wide_spec is not None
    assert spec.wide_spec.k is not None
    assert spec.wide_spec.v is not None
    stored = {"k": spec.wide_spec.k.dtype, "v": spec.wide_spec.v.dtype}
    assert stored == {"k": INT4, "v": INT4} | {side: KVDtype.BFLOAT16}
    narrow, both = (bytes_per_token_at(planned(recent=n), 8192) for n in (0, 128))
    more, most = bytes_per_token_at(plan, 8192) - narrow, both - narrow
    assert more == most * (2 * 64 + 32 + 4) / (2 * 2 * 64), "two bytes, and four bits and a scale"


def test_a_wide_side_that_layers_store_as_wide_has_no_effect() -> None:
    rules = ("0-:k=bf16,v=int4_per_token_head",)
    plan = planned(INT4, *rules, stored=one_side("k"))
    assert not plan.has_wide_rows
    assert planned(INT4, *rules, stored=one_side("v")).has_wide_rows


@pytest.mark.parametrize("text", ["q=bf16", "k=", "=bf16", "k=bf16/int8", "k=bf16,v=int8"])
def test_what_names_no_side_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_sides(text, asked_by="--kv-recent-dtype")


@pytest.mark.parametrize("text", ["k=bf16/int8", "k=bf16,v=int8", "v=k=bf16"])
def test_one_side_has_one_format(text: str) -> None:
    with pytest.raises(BadValue, match="more than one format") as caught:
        parse_sides(text, asked_by="--kv-recent-dtype")
    assert "K/V" in str(caught.value)


def test_a_side_that_is_not_wide_shares_what_its_rows_are_encoded_with() -> None:
    plan = planned(INT4, "0:k=fp8,v=int4_per_token_head", stored=one_side("v"))
    pool = KVPool(plan, 4, device=torch.device("cpu"), scales={(0, Side.K): torch.tensor([2.0])})
    cache = pool[0]
    assert cache.wide is not None
    assert cache.wide.k_scale is cache.k_scale
    pool.refit({(0, Side.K): torch.tensor([3.0])})
    assert cache.wide.k_scale is not None
    assert cache.wide.k_scale.item() == 3.0
    assert cache.saturation is not None
    assert cache.wide.saturation is None, "one of two equal rows counts"


@pytest.mark.parametrize(
    "narrow", [INT4, KVDtype.FP8_E4M3, KVDtype.TURBOQUANT_V3, Follow.CHECKPOINT]
)
def test_wide_rows_have_formats_that_are_wide(narrow: KVDtype | Follow) -> None:
    with pytest.raises(BadValue, match="wide rows cannot be") as fault:
        planned(stored=SideRequests(narrow, Follow.MODEL))
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
    narrow = bytes_per_token_at(planned(recent=0), 8192)
    wide = 3 * 2 * 2 * 64 * 2  # layers, heads, sides, numbers, bytes
    pages = most_pages(128, 8192, 1, 16, SINK_TOKENS)
    assert pages == 9 + 1
    assert bytes_per_token_at(plan, 8192) == narrow + pages * 16 * wide / 8192
    assert bytes_per_token_at(plan, 16) == plan.bytes_per_token + wide
    assert bytes_per_token_at(planned(recent=0), 16) == plan.bytes_per_token


def test_layers_with_windows_count_the_rows_that_they_keep() -> None:
    """Windows of 128 tokens lie in up to 9 pages of 16. Three of the six layers have one."""
    plan = planned(recent=0)
    each = plan.layers[1].bytes_per_token
    assert plan.bytes_per_token == 6 * each
    kept = [kept_tokens(plan, plan.layers[1], length) for length in (100, 128, 129, 1024)]
    assert kept == [100, 128, 129, 144]
    assert kept_tokens(plan, plan.layers[0], 1024) == 1024
    assert bytes_per_token_at(plan, 100) == 6 * each
    assert bytes_per_token_at(plan, 1024) == 3 * each * (1024 + 144) / 1024
    assert bits_per_value_at(plan, 100) == bits_per_value_at(plan, 1024) == 4.5
    assert not depends_on_length(plan, 144)
    assert depends_on_length(plan, 145)
    assert depends_on_length(plan)


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
