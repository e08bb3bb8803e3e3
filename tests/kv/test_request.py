"""Reading names, selectors, rules and policy files: the edge where text ends."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.errors import BadValue, ConfigError, UnknownName
from kvant.kv.dtype import Follow, KVDtype
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.names import FormatRequest, known_names, parse_format
from kvant.kv.policy import read_policy
from kvant.kv.request import parse_rule, parse_selectors, parse_skips
from kvant.kv.wide import SINK_TOKENS
from kvant.plan.config import LLMOptions, config_of


def layer(index: int, kind: Attention = Attention.FULL) -> LayerGeometry:
    return LayerGeometry(index, f"model.layers.{index}.self_attn", kind, 8, 2, 64, 64)


def selected(text: str, num_layers: int = 8) -> list[int]:
    selectors = parse_selectors(text, asked_by="test")
    kinds = [Attention.SLIDING if i % 2 else Attention.FULL for i in range(num_layers)]
    return [
        i
        for i in range(num_layers)
        if any(s.matches(layer(i, kinds[i]), num_layers) for s in selectors)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", [3]),
        ("-1", [7]),
        ("0-2", [0, 1, 2]),
        ("5-", [5, 6, 7]),
        ("-2-", [6, 7]),
        ("-3--2", [5, 6]),
        ("2--6", [2]),
        ("0, 4-5", [0, 4, 5]),
        ("sliding_window", [1, 3, 5, 7]),
        ("full", [0, 2, 4, 6]),
        (r"re:layers\.[37]\.", [3, 7]),
        (r"0,re:layers\.[37]\.", [0, 3, 7]),
        (r"re:layers\.(3|5,7)\.", [3]),
    ],
)
def test_selectors(text: str, expected: list[int]) -> None:
    assert selected(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-2-3", "re:(", "0,,1", "sliding", "--", "1.5"])
def test_malformed_selectors_are_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_selectors(text, asked_by="--flag")


@pytest.mark.parametrize("name", known_names())
def test_every_known_name_is_read_in_any_case(name: str) -> None:
    assert parse_format(name.upper(), asked_by="t") == parse_format(name, asked_by="t")


def test_a_refusal_lists_each_known_name_once() -> None:
    with pytest.raises(UnknownName) as refused:
        parse_format("int5", asked_by="--kv-cache-dtype")
    listed = str(refused.value.why).partition(": ")[2].split(", ")
    assert len(listed) == len(set(listed))
    assert "int4_feedback" in listed


def test_a_pair_is_two_formats() -> None:
    wanted = parse_format("fp8/int4_per_token_head", asked_by="t")
    assert wanted == FormatRequest(KVDtype.FP8_E4M3, KVDtype.INT4_PER_TOKEN_HEAD)
    assert parse_format("model/nvfp4", asked_by="t").k is Follow.MODEL


@pytest.mark.parametrize("text", ["fp8/", "/fp8", "fp8/fp8/fp8", "/"])
def test_half_a_pair_is_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_format(text, asked_by="t")


def test_encodings_of_devices_cannot_be_asked_for() -> None:
    with pytest.raises(UnknownName):
        parse_format("fp8_e4m3fnuz", asked_by="t")


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_format, parse_selectors, parse_rule, parse_skips):
        with contextlib.suppress(ConfigError):
            parse(text, asked_by="t")


def test_rules_name_sides() -> None:
    (rule,) = parse_rule("0-3:k=fp8", asked_by="t").target.rules
    assert (rule.k, rule.v) == (KVDtype.FP8_E4M3, None)
    (rule,) = parse_rule(r"re:a:b:v=model", asked_by="t").target.rules
    assert (rule.k, rule.v) == (None, Follow.MODEL)
    assert rule.selector.text == "re:a:b"


def test_the_draft_prefix_addresses_the_drafter() -> None:
    parsed = parse_rule("draft:0:fp8", asked_by="t")
    assert not parsed.target.rules
    assert parsed.draft.rules[0].k is KVDtype.FP8_E4M3
    assert parse_skips("draft:0,1", asked_by="t").draft.skips[1].selector.first == 1


@pytest.mark.parametrize(
    "text",
    ["[1]", "rules: 3", "unknown: 1", "rules: [{layers: 0}]", "rules: [{0: fp8, 1: fp8}]", "a: [",
     "rules: ['draft:0:fp8']", "kv_cache_dtype: fp9", "skip_layers: 0", "draft: {draft: {}}",
     "recent_tokens: many", "recent_tokens: -1", "sink_tokens: 4", "recent_tokens: 0\nsink_tokens: 4",
     "draft: {recent_tokens: 64}", "draft: {rules: [{layers: 0, recent_tokens: 64}]}",
     "rules: [{layers: 0, sink_tokens: 4}]", "rules: [{layers: 0, recent_tokens: -1}]",
     "{recent_tokens: 64, recent_dtype: fp9}", "{recent_tokens: 64, recent_dtype: q=model}"],
)  # fmt: skip
def test_malformed_policies_are_refused_with_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"policy\.yaml"):
        read_policy(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "policy.yaml holds no lines of KEY: VALUE\n  why: it is empty"),
        ("- a", "why: it is ['a']"),
        ("rules: 3", "rules is no list\n  why: it is 3"),
        ("nope: 1", "known are kv_cache_dtype, skip_layers, rules, recent_tokens, sink_tokens, recent_dtype, "
         "draft, model"),
        ("draft: {recent_tokens: 1}", "known are kv_cache_dtype, skip_layers, rules"),
        ("rules: [{layers: 1, q: fp8}]", "it has the key layers, and one or more of k, v, recent_tokens"),
    ],
)  # fmt: skip
def test_what_a_policy_may_hold_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(BadValue) as refused:
        read_policy(path)
    assert said in str(refused.value)


def test_a_missing_policy_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match=r"gone\.yaml"):
        read_policy(tmp_path / "gone.yaml")


def test_a_policy_asks_for_wide_rows_and_the_option_decides(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("rules: [{1: int4_per_token_head}]\nrecent_tokens: 64\nrecent_dtype: bf16\n")
    wide = read_policy(path).target.wide
    assert wide is not None
    assert (wide.sink, wide.recent, wide.format.k) == (SINK_TOKENS, 64, KVDtype.BFLOAT16)
    assert "policy.yaml: recent_tokens" in wide.asked_by

    def recent(tokens: int | None) -> int | None:
        options: LLMOptions = {"kv_cache_policy": path, "kv_recent_tokens": tokens}
        asked = config_of("tiny", options).plan.requests.target.wide
        return None if asked is None else asked.recent

    assert (recent(None), recent(32), recent(0)) == (64, 32, None)


def test_a_rule_of_a_policy_asks_for_wide_rows_of_its_layers(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "recent_tokens: 64\nrecent_dtype: bf16\nrules: [{layers: '1,4', v: nvfp4, recent_tokens: 256},"
        "{layers: 2, recent_tokens: 0}, {layers: 3, sink_tokens: 48, recent_dtype: k=model},"
        "{layers: 0-4, k: fp8}]\n"
    )
    request = read_policy(path).target
    found = [request.wide_of(layer(index), 6) for index in range(6)]
    rows = [None if wide is None else (wide.sink, wide.recent) for wide in found]
    assert rows == [(16, 64), (16, 256), None, (48, 64), (16, 256), (16, 64)]
    formats = [None if wide is None else str(wide.format) for wide in found]
    assert formats == ["bfloat16", "bfloat16", None, "k=model", "bfloat16", "bfloat16"]
    assert len(request.rules) == 3
    options: LLMOptions = {"kv_cache_policy": path, "kv_recent_tokens": 0}
    assert not config_of("tiny", options).plan.requests.target.every_wide


def test_a_policy_speaks_to_target_and_draft(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("skip_layers: [0, full]\nrules: [{1: bf16}]\ndraft: {kv_cache_dtype: fp8}\n")
    parsed = read_policy(path)
    assert [skip.selector.text for skip in parsed.target.skips] == ["0", "full"]
    assert parsed.target.rules[0].v is KVDtype.BFLOAT16
    assert parsed.draft.explicit[0].format.k is KVDtype.FP8_E4M3
