"""`kvant tune`: costs, budgets, the policy file, and what refuses it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.cli.tune import RECENT, _budget, _formats, _rows
from kvant.engine.llm import LLM
from kvant.errors import BadValue, NotServable
from kvant.kv.dtype import Follow, KVDtype
from kvant.kv.format import Side
from kvant.kv.groups import bits_per_value_at, bytes_per_token_at, most_pages
from kvant.kv.names import FormatRequest, SideRequests, parse_sides
from kvant.kv.policy import read_policy
from kvant.kv.request import AskedWide, Requests, check_request
from kvant.kv.wide import ask_wide
from kvant.measure.quality.kept import Kept
from kvant.measure.quality.texts import read_text
from kvant.measure.tuning import tune
from kvant.measure.tuning.checks import check_tunable, rows_to_choose
from kvant.measure.tuning.costs import Costs
from kvant.measure.tuning.policy_file import policy_text, report, vllm_map
from kvant.measure.tuning.search import Option, best_within, fewest_bytes, least_kl
from kvant.measure.tuning.tune import (
    ROUNDS,
    Lesson,
    Tuner,
    between,
    divide_text,
    plan_of_uniform,
)
from kvant.plan.plan import PlanRequest
from tests.cli.command import kvant
from tests.engine import tiny_chat
from tests.models import families
from tests.planned import plan_of

DTYPES = [
    KVDtype.INT8_PER_TOKEN_HEAD,
    KVDtype.INT4_PER_TOKEN_HEAD,
    KVDtype.FP8_PER_TOKEN_HEAD,
]
FORMATS = [(side, dtype) for side in Side for dtype in DTYPES]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    torch.set_num_threads(1)
    path = tiny_chat.build(tmp_path_factory.mktemp("tune"))
    return LLM(path, dtype="float32", kv_cache_memory="1MiB")


@pytest.fixture(scope="module")
def tuner(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Tuner:
    folder = tmp_path_factory.mktemp("text")
    words = folder / "words.txt"
    words.write_text(" ".join(f"{i}: the sea, the open sea, measured twice." for i in range(60)))
    lesson = divide_text(read_text(words, llm), llm, 64, 64, 256)
    return Tuner(llm, lesson, FORMATS, Kept(folder, {}), lambda *_: None)


def test_a_format_that_another_beats_is_no_choice(tuner: Tuner) -> None:
    """Both 8-bit formats take the same bytes, and integers are exacter."""
    (options,) = tuner.options().values()
    assert set(options) == {(i, side) for i in range(len(tuner.wide.layers)) for side in Side}
    for found in options.values():
        assert [str(o.dtype) for o in found] == [
            "int4_per_token_head", "int8_per_token_head", "float32",
        ]  # fmt: skip
        assert found[0].kl > 10 * found[1].kl > found[2].kl == 0
        assert found[0].bytes < found[1].bytes < found[2].bytes


def test_costs_add_up_to_what_all_layers_cost_together(tuner: Tuner) -> None:
    (options,) = tuner.options().values()
    keys = {place: KVDtype.INT4_PER_TOKEN_HEAD for place in options if place[1] is Side.K}
    key = Side.K, KVDtype.INT4_PER_TOKEN_HEAD, None
    together = tuner._means("check", {key: tuner.plan_of(keys, {})}, tuner.lesson.measured)[key]
    assert sum(options[place][0].kl for place in keys) == pytest.approx(together, rel=1e-6)


def test_a_policy_of_mixed_formats_beats_the_uniform_one(tuner: Tuner, tmp_path: Path) -> None:
    mixed = tuner.for_bits(8.0)
    assert mixed.policy.bits <= 8.0
    uniform = {one.name: one for one in mixed.uniform}
    narrow = uniform["int4_per_token_head"].figures
    assert 0 < mixed.policy.figures.kld_mean < narrow.kld_mean
    best = mixed.best_uniform
    assert best is not None
    assert best.bytes_per_token <= mixed.policy.bytes_per_token
    assert best.figures.kld_mean == min(
        one.figures.kld_mean for one in mixed.uniform if one.bits <= mixed.policy.bits
    )
    stored = {str(o.dtype) for one in mixed.chosen.chosen.values() for o in one.sides.values()}
    assert len(stored) > 1

    geometry = tuner.llm.planned.target.geometry
    text = policy_text(mixed, geometry, "tiny", "kvant tune")
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    loaded = LLM(
        tuner.llm.model_path, dtype="float32", kv_cache_memory="1MiB", kv_cache_policy=path
    )
    assert loaded.plan.fingerprint == mixed.plan.fingerprint
    assert loaded.plan.bytes_per_token == mixed.policy.bytes_per_token
    assert len(yaml.safe_load(text)["rules"]) == len(geometry.layers)

    body = json.loads(json.dumps(report(mixed, geometry, "tiny")))
    assert body["policy"]["kld_mean"] == mixed.policy.figures.kld_mean
    vllm = body["other_engines"]["vllm"]
    assert set(vllm) == {"kv_cache_dtype", "kv_cache_dtype_skip_layers"}
    modelopt = body["other_engines"]["modelopt"]["kv_cache_quantized_layers"]
    assert {entry["quant_algo"] for entry in modelopt.values()} <= {
        "FP8", "NVFP4", "FP8_K_NVFP4_V",
    }  # fmt: skip


def test_a_format_whose_costs_were_wrong_is_avoided(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is told that values in 2 bits cost nearly nothing. Reading policies tells otherwise."""
    (options,) = tuner.options().values()
    narrow = KVDtype.NORMAL2
    wrong = {
        (index, side): [Option(narrow, tuner._bytes(index, side, narrow), 1e-9), *found]
        if side is Side.V
        else found
        for (index, side), found in options.items()
    }
    assert tuner.for_bits(7.0).avoided is None
    monkeypatch.setattr(Tuner, "options", lambda _: {None: wrong})
    tuned = tuner.for_bits(7.0)
    avoided = tuned.avoided
    assert avoided is not None
    assert (avoided.side, avoided.dtype) == (Side.V, narrow)
    assert avoided.kl < avoided.kl_with
    assert all(one.sides[Side.V].dtype is not narrow for one in tuned.chosen.chosen.values())
    body = report(tuned, tuner.llm.planned.target.geometry, "tiny")
    assert body["avoided"] == {
        "side": "v", "format": "normal2", "kld_mean": avoided.kl, "kld_mean_with": avoided.kl_with,
    }  # fmt: skip
    monkeypatch.setattr(tune, "best_without_one", lambda *_: {})
    misled = tuner.for_bits(7.0)
    assert misled.avoided is None
    assert tuned.policy.figures.kld_mean < misled.policy.figures.kld_mean


def test_the_map_for_vllm_names_formats_of_vllm_alone() -> None:
    short, fed = KVDtype.INT4_SHORT, KVDtype.INT4_SHORT_FEEDBACK
    eight, wide, two = KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.BFLOAT16, KVDtype.NORMAL2
    assert vllm_map({0: (fed, short), 1: (eight, short), 2: (short, two), 3: (wide, short)}) == {
        "kv_cache_dtype": "int4_per_token_head", "kv_cache_dtype_skip_layers": ["1", "3"],
    }  # fmt: skip
    assert vllm_map({0: (eight, short), 1: (eight, two), 2: (short, short)}) == {
        "kv_cache_dtype": "turboquant_k8v4", "kv_cache_dtype_skip_layers": [],
    }  # fmt: skip
    assert vllm_map({0: (eight, eight)})["kv_cache_dtype"] == "int8_per_token_head"
    assert vllm_map({0: (two, two)})["kv_cache_dtype"] == "turboquant_3bit_nc"
    assert vllm_map({0: (wide, wide)}) == {
        "kv_cache_dtype": "auto", "kv_cache_dtype_skip_layers": [],
    }  # fmt: skip


def test_wide_rows_are_measured_counted_and_written(tuner: Tuner, tmp_path: Path) -> None:
    rows = ask_wide(16, 16, None, asked_by="--kv-recent-tokens 16")
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"{i}: the open sea, measured twice." for i in range(90)))
    lesson = divide_text(read_text(text, tuner.llm), tuner.llm, 64, 64, 256, 256)
    assert lesson.held_out.shape == (1, 256)
    beside = [FormatRequest(KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD)]
    parts = Kept(tmp_path, {"rows": 16})
    wide = Tuner(tuner.llm, lesson, FORMATS, parts, tuner.on_progress, beside, [rows])
    found = wide.for_bits(16.0)
    assert found.plan.has_wide_rows
    narrow = found.plan.bytes_per_token
    assert narrow < found.policy.bytes_per_token == round(found.chosen.bytes / 256)
    assert found.policy.bits <= 16.0
    alone, with_rows = found.uniform
    assert alone.name == "int4_per_token_head"
    assert alone.rows is None
    assert with_rows.rows is not None
    assert with_rows.name == f"int4_per_token_head, last {with_rows.rows.recent} wide"
    page = 16 * (with_rows.bytes_per_token - alone.bytes_per_token) // (with_rows.rows.recent + 32)
    left = found.policy.bytes_per_token - with_rows.bytes_per_token
    assert 0 <= left < page, "as many rows as fit into the policy's bytes"
    assert with_rows.figures.kld_mean < alone.figures.kld_mean
    assert found.best_without_rows is alone

    geometry = tuner.llm.planned.target.geometry
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text(found, geometry, "tiny", "kvant tune"))
    loaded = LLM(
        tuner.llm.model_path, dtype="float32", kv_cache_memory="1MiB", kv_cache_policy=path
    )
    assert loaded.plan.fingerprint == found.plan.fingerprint
    body = report(found, geometry, "tiny")
    assert body["tokens"] == 256
    assert body["wide_rows"] == {"recent": 16, "sink": 16, "format": "model"}
    with pytest.raises(BadValue, match="the narrowest policy has") as caught:
        wide.for_bits(16 * narrow / found.plan.bytes_per_token_16bit / 2)
    assert wide.for_bits(float(caught.value.ways_out[0].arguments[1].removesuffix("bits")))


def test_each_layer_gets_the_wide_rows_that_pay(tuner: Tuner, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"{i}: the open sea, measured twice." for i in range(90)))
    lesson = divide_text(read_text(text, tuner.llm), tuner.llm, 64, 64, 256, 256)
    assert lesson.measured.shape == (1, 64)
    assert lesson.whole.shape == lesson.held_out.shape == (1, 256), "step 1 reads what counts"
    eight = parse_sides("int8_per_token_head", asked_by="test")
    rows = [
        None,
        ask_wide(16, 16, None, asked_by="test"),
        ask_wide(16, 16, eight, asked_by="test"),
    ]
    beside = [FormatRequest(KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD)]
    formats = [KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD]
    choices = [(side, dtype) for side in Side for dtype in formats]
    free = Tuner(tuner.llm, lesson, choices, Kept(tmp_path, {}), tuner.on_progress, beside, rows)
    layers = free._layers(free.options())
    fewest = fewest_bytes(layers).bytes
    assert (
        fewest
        == free.plan_of({place: formats[0] for place in free.places()}, {}).bytes_per_token * 256
    )
    budgets = range(fewest, 2 * fewest, fewest // 40)
    found, budget = next(
        (one, budget)
        for budget in budgets
        if (one := best_within(layers, budget)) and len({o.rows for o in one.chosen.values()}) > 1
    )
    tuned = free.for_bits(16 * (budget + 0.5) / 256 / free.wide.bytes_per_token_16bit)
    assert tuned.chosen == found
    assert tuned.policy.bytes_per_token <= budget / 256
    assert {one.rows and str(one.rows.format) for one in tuned.uniform} == {
        None, "model", "int8_per_token_head",
    }  # fmt: skip

    geometry = tuner.llm.planned.target.geometry
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text(tuned, geometry, "tiny", "kvant tune"))
    loaded = LLM(
        tuner.llm.model_path, dtype="float32", kv_cache_memory="1MiB", kv_cache_policy=path
    )
    assert loaded.plan.fingerprint == tuned.plan.fingerprint
    body = report(tuned, geometry, "tiny")
    assert body["wide_rows"] is None, "not the same everywhere"
    assert {str(layer["wide_rows"]) for layer in body["layers"]} == {
        str(one.rows and {"recent": 16, "sink": 16, "format": str(one.rows.format)})
        for one in found.chosen.values()
    }


def test_a_uniform_format_has_as_many_wide_rows_as_fit(tuner: Tuner, tmp_path: Path) -> None:
    usual = SideRequests(Follow.MODEL, Follow.MODEL)
    some = AskedWide(16, 16, usual, "test"), AskedWide(16, 64, usual, "test")
    many = replace(tuner, rows=[None, *some])
    one = FormatRequest(KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD)

    def size(rows: Any) -> float:
        return bytes_per_token_at(plan_of_uniform(many.llm, one, rows), many.length)

    narrow, least = size(None), size(replace(some[0], recent=16))
    each = size(replace(some[0], recent=32)) - least
    assert many._rows_beside(one, int(narrow)) == [None, *some]
    for pages in (0, 1, 2):
        fitting, *more = many._rows_beside(one, int(least + (pages + 0.5) * each))[1:]
        assert fitting is not None
        assert fitting.recent == 16 * (1 + pages)
        assert more == [rows for rows in some if rows.recent > 16 * (1 + pages)]


def test_costs_between_two_numbers_of_rows_lie_on_a_line() -> None:
    """Of the logarithms of both: a cost that falls as 1 / rows^2 does so between them, too."""
    int4, int8, wide = DTYPES[1], DTYPES[0], KVDtype.FLOAT32
    options = [
        [Option(int4, 10, 64.0 / n**2), Option(int8, 20, 1.0 / n**2), Option(wide, 80, 0.0)]
        for n in (16, 128)
    ]
    found = between(options[0], options[1], 2 / 3)
    assert [one.kl for one in found] == pytest.approx([64.0 / 64**2, 1.0 / 64**2, 0.0])
    assert [one.dtype for one in between(options[0], options[1][:1], 0.5)] == [int4]


def test_two_numbers_of_rows_are_measured(tuner: Tuner, tmp_path: Path) -> None:
    rows = [ask_wide(16, n, None, asked_by="test") for n in (8, 16, 24, 32)]
    eight = parse_sides("int8_per_token_head", asked_by="test")
    one = ask_wide(16, 24, eight, asked_by="test")
    many = replace(tuner, rows=[None, *rows, one], kept=Kept(tmp_path, {}))
    assert many._measured_rows == [None, rows[0], rows[-1], one]
    options = many.options()
    assert list(options) == many.rows
    for place in many.places():
        kl = [
            next(o.kl for o in options[one][place] if o.dtype is KVDtype.INT4_PER_TOKEN_HEAD)
            for one in rows
        ]
        assert kl[0] > kl[1] > kl[2] > kl[3] > 0


def with_windows(family: str, place: Path) -> tuple[LLM, Lesson]:
    """Returns a model, half of whose layers have windows, and windows of 64 and of 256 tokens of text."""
    llm = LLM(tiny_chat.build(place, family=family), dtype="float32", kv_cache_memory="2MiB")
    text = place / "words.txt"
    text.write_text(" ".join(f"{i}: the open sea, measured twice." for i in range(90)))
    return llm, divide_text(read_text(text, llm), llm, 64, 64, 256, 256)


def test_layers_with_windows_have_no_wide_rows(tmp_path: Path) -> None:
    """Half of this model's layers release what is behind their window; rules for them would be refused."""
    llm, lesson = with_windows("gemma2", tmp_path)
    int4 = KVDtype.INT4_PER_TOKEN_HEAD
    formats = [(side, int4) for side in Side]
    rows = ask_wide(16, 16, None, asked_by="--kv-recent-tokens 16")
    able = {layer.index for layer in llm.planned.target.geometry.layers if layer.window is None}
    assert 0 < len(able) < len(llm.plan.layers)
    uniform = [FormatRequest(int4, int4)]
    for choices in ([None, rows], [rows]):
        kept = Kept(tmp_path, {"choices": len(choices)})
        tuned = Tuner(llm, lesson, formats, kept, lambda *_: None, uniform, choices).for_kl(1e-3)
        stored = {spec.geometry.index: spec.wide for spec in tuned.plan.layers}
        assert {index for index, wide in stored.items() if wide is not None} <= able
        assert {i for i, one in tuned.chosen.chosen.items() if one.rows is not None} <= able
        policy = tmp_path / "policy.yaml"
        policy.write_text(policy_text(tuned, llm.planned.target.geometry, "tiny", "kvant tune"))
        loaded = LLM(
            llm.model_path, dtype="float32", kv_cache_memory="2MiB", kv_cache_policy=policy
        )
        assert loaded.plan.fingerprint == tuned.plan.fingerprint
    assert tuned.plan.has_wide_rows


def test_bytes_of_layers_with_windows_are_those_of_the_plan(tmp_path: Path) -> None:
    """Two of four layers keep a window of 12 tokens in whole pages; the others keep all 256."""
    llm, lesson = with_windows("gemma3", tmp_path)
    rows = [None, ask_wide(16, 16, None, asked_by="test")]
    formats = [(side, dtype) for side in Side for dtype in DTYPES[:2]]
    beside = [FormatRequest(dtype, dtype) for dtype in DTYPES[:2]]
    kept = Kept(tmp_path, {})
    made = Tuner(llm, lesson, formats, kept, lambda *_: None, beside, rows)
    tuned = made.for_bits(9.0)

    def planned_bytes(policy: Path) -> int:
        """Bytes of a decoding sequence, by the groups that `kvant plan` shows."""
        request = PlanRequest(
            str(llm.model_path), DeviceFacts(DeviceKind.CPU), dtype=llm.plan.compute_dtype
        )
        asked = Requests(target=read_policy(policy).target)
        plan = plan_of(replace(request, requests=asked, max_model_len=256))
        size = plan.limits.page_size
        pages = [most_pages(one.window, 256, 1, size, one.sink) for one in plan.groups]
        assert len(pages) > 1
        return sum(
            count * size * one.bytes_per_token
            for count, one in zip(pages, plan.groups, strict=True)
        )

    policy = tmp_path / "policy.yaml"
    policy.write_text(policy_text(tuned, llm.planned.target.geometry, "tiny", "kvant tune"))
    assert "Bits are those of 256 tokens" in policy.read_text()
    assert tuned.chosen.bytes == planned_bytes(policy)
    assert tuned.policy.bytes_per_token == round(tuned.chosen.bytes / 256)
    assert tuned.policy.bits <= 9.0
    spans = {spec.geometry.window: spec.bytes_per_token for spec in made.wide.layers}
    assert len(spans) == 2
    each = spans[None]  # 32 bits a value
    assert made.stored_bytes(made.wide) == round(2 * each * (256 + 32) / 256)
    assert bits_per_value_at(made.wide, 256) == 32
    for one in tuned.uniform:
        if one.rows is None:
            assert one.bits == {"int8_per_token_head": 10, "int4_per_token_head": 6}[one.name]
    with pytest.raises(BadValue, match=r"the narrowest policy has 6\.00 bits") as fault:
        made.for_bits(5.9)
    assert made.for_bits(float(fault.value.ways_out[0].arguments[1].removesuffix("bits")))


def test_wide_rows_that_no_layer_can_store_are_no_choice(tmp_path: Path) -> None:
    """Hybrids release no page before a sequence ends, so an engine refuses wide rows for them."""
    families.build("qwen3_5_text", tmp_path)
    llm = LLM(tmp_path, dtype="float32", kv_cache_memory="4MiB", max_model_len=64)
    rows = [None, ask_wide(16, 16, None, asked_by="--kv-recent-tokens 16")]
    assert rows_to_choose(llm.planned, rows, named=False) == [None]
    with pytest.raises(BadValue, match="--kv-recent-tokens 16: no layer of") as fault:
        rows_to_choose(llm.planned, rows, named=True)
    assert [str(way) for way in fault.value.ways_out] == ["leave the option out"]
    int4 = FormatRequest(KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD)
    with pytest.raises(NotServable, match="recurrent"):  # a figure of what no engine stores
        plan_of_uniform(llm, int4, rows[1])


def test_a_layer_may_store_one_side_wide_alone(tuner: Tuner, tmp_path: Path) -> None:
    """Keys that lose much without wide rows, beside values that lose nothing: the search takes wide keys."""
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"{i}: the open sea, measured twice." for i in range(90)))
    lesson = divide_text(read_text(text, tuner.llm), tuner.llm, 64, 64, 256, 256)
    both = ask_wide(16, 16, None, asked_by="test")
    int4 = KVDtype.INT4_PER_TOKEN_HEAD
    formats = [(side, int4) for side in Side]
    made = Tuner(
        tuner.llm, lesson, formats, Kept(tmp_path, {}), tuner.on_progress, [], [None, both]
    )
    costs = {
        rows: {
            (index, side): [Option(int4, made._bytes(index, side, int4), kl)]
            for index, side in made.places()
            for kl in [0.0 if rows or side is Side.V else 1.0]
        }
        for rows in made.rows
    }
    layers = made._layers(costs)
    found = least_kl(layers)
    for one in found.chosen.values():
        assert one.rows is not None
        assert str(one.rows.format) == "k=model"
        assert one.kl == 0.0
    tuned = made._verified(costs, found)
    assert tuned.policy.bytes_per_token == round(found.bytes / 256)
    assert all(layer.wide and list(layer.wide.sides) == [Side.K] for layer in tuned.plan.layers)
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text(tuned, tuner.llm.planned.target.geometry, "tiny", "kvant tune"))
    loaded = LLM(
        tuner.llm.model_path, dtype="float32", kv_cache_memory="1MiB", kv_cache_policy=path
    )
    assert loaded.plan.fingerprint == tuned.plan.fingerprint
    alone = Tuner(tuner.llm, lesson, formats, Kept(tmp_path, {}), tuner.on_progress, [], [both])
    assert {one.rows for ways in alone._layers({both: costs[both]}).values() for one in ways} == {
        both
    }, "costs without wide rows were not measured"


def test_wide_rows_to_choose_from_are_a_small_share_of_the_sequence() -> None:
    def recent(*given: Any) -> list[int]:
        return [0 if one is None else one.recent for one in _rows(*given)]

    assert recent(None, None, None, 512, 512) == [0]
    assert recent(None, None, None, 2048, 2048) == [0, 48, 112, 176, 240]
    assert recent(None, None, None, 8192, 4096) == [0, *RECENT]
    assert recent(None, None, None, 8192, 512) == [0, 48, 112, 176, 240]
    assert recent([0, 500], None, None, 1024, 1024) == [0, 500]
    every = _rows([0, 112], 4, ["model", "int8_per_token_head"], 512, 512)
    assert [one and (one.sink, one.recent, str(one.format)) for one in every] == [
        None, (4, 112, "model"), (4, 112, "int8_per_token_head"),
    ]  # fmt: skip
    for given in ((None, None, ["int8_per_token_head"], 512, 512), ([0], 4, None, 8192, 512)):
        with pytest.raises(BadValue, match="no recent tokens are wide"):
            _rows(*given)
    with pytest.raises(BadValue, match="leaves no narrow rows in windows of 512 tokens") as caught:
        _rows([112, 1008], None, None, 8192, 512)
    way = caught.value.ways_out[0].arguments
    assert way == ("--context", "4096")
    assert _rows([112, 1008], None, None, 8192, int(way[1]))


def test_a_window_that_does_not_fit_names_the_option_of_its_length(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = torch.zeros(1, 64, dtype=torch.int64), torch.zeros(1, 256, dtype=torch.int64)
    longer = replace(tuner, lesson=Lesson(short, long, long))
    named = []

    def at_once(*_: object, option: str, **__: object) -> int:
        named.append(option)
        return 1

    monkeypatch.setattr("kvant.measure.tuning.tune.windows_at_once", at_once)
    for ids in (short, long):
        longer._comparisons("a", {"b": tuner.wide}, ids)
    assert named == ["--context", "--verify-context"]


def test_a_policy_for_another_model_is_refused(tuner: Tuner, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text('model: {name: other, fingerprint: "0123"}\nrules: ["0:fp8"]\n')
    request = read_policy(path).target
    with pytest.raises(BadValue, match="made for another model, other") as caught:
        check_request(request, tuner.llm.planned.target.geometry)
    assert "fingerprint is 0123" in caught.value.why
    path.write_text("model: {name: other, fingerprint: 12}\n")
    with pytest.raises(BadValue, match=r"policy\.yaml: model"):
        read_policy(path)


def test_a_kl_budget_is_met_on_held_out_text(tuner: Tuner) -> None:
    small = tuner.for_bits(8.0).policy
    tight = small.figures.kld_mean / 3
    found = tuner.for_kl(tight).policy
    assert found.figures.kld_mean <= tight
    assert small.bytes_per_token < found.bytes_per_token < tuner.wide.bytes_per_token


def test_a_kl_budget_is_met_however_wrong_the_predictions_are(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round's policy loses more, beside its prediction, than the one before: the model dtype remains."""
    aims = []
    usual = Tuner._verified

    def worse(self: Tuner, options: Any, chosen: Any) -> Any:
        tuned = usual(self, options, chosen)
        aims.append(chosen.kl)
        figures = replace(tuned.policy.figures, kld_mean=chosen.kl * 10.0 ** len(aims))
        return replace(tuned, policy=replace(tuned.policy, figures=figures))

    monkeypatch.setattr(Tuner, "_verified", worse)
    found = tuner.for_kl(tuner.for_bits(8.0).chosen.kl)
    assert len(aims) > ROUNDS
    assert aims[-1] == found.policy.figures.kld_mean == 0.0


def test_budgets_that_cannot_be_met_show_the_closest(tuner: Tuner, tmp_path: Path) -> None:
    def told(done: int, total: int) -> None:
        raise AssertionError("measured before the budget was refused")

    early = Tuner(tuner.llm, tuner.lesson, FORMATS, Kept(tmp_path, {}), told)
    with pytest.raises(BadValue, match=r"--budget 2bits cannot be met") as caught:
        early.for_bits(2.0)
    way = caught.value.ways_out[0].arguments[1]
    assert tuner.for_bits(float(way.removesuffix("bits"))).policy.bits > 2
    narrow = Tuner(tuner.llm, tuner.lesson, FORMATS, tuner.kept, tuner.on_progress)
    (costs,) = tuner.options().values()
    options = {place: [o for o in found if o.kl > 0] for place, found in costs.items()}
    narrow.options = lambda: {None: options}  # type: ignore[method-assign]
    with pytest.raises(BadValue, match="--max-kl 0 cannot be met") as caught:
        narrow.for_kl(0.0)
    assert "the closest policy has a mean KL divergence of" in caught.value.why


def test_text_that_is_too_short_says_how_much_is_needed(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("the sea")
    with pytest.raises(BadValue, match="too short to tune on") as caught:
        divide_text(read_text(path, llm), llm, 64, 64, 256)
    assert "it has 7 tokens; 320 are needed" in caught.value.why


def test_one_budget_is_given_in_bits() -> None:
    assert _budget("4.5bits", None) == _budget("4.5", None) == 4.5
    assert _budget(None, 0.1) is None
    for wrong in ((None, None), ("4", 0.1), ("4GiB", None), ("0bits", None)):
        with pytest.raises(BadValue):
            _budget(*wrong)
    assert _formats(["turboquant_3bit_nc", "fp8"]) == [
        (Side.K, KVDtype.TURBOQUANT_K3), (Side.V, KVDtype.TURBOQUANT_V3),
        (Side.K, KVDtype.FP8_E4M3), (Side.V, KVDtype.FP8_E4M3),
    ]  # fmt: skip
    with pytest.raises(BadValue, match="is no storage format"):
        _formats(["auto"])


def test_estimated_costs_are_close_to_readings(tuner: Tuner, tmp_path: Path) -> None:
    """In all layers but the first, whose values depend on a token alone: its errors repeat with the token."""
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"{i}: the open sea, measured twice." for i in range(90)))
    lesson = divide_text(read_text(text, tuner.llm), tuner.llm, 128, 512, 256, 256)
    eight = parse_sides("int8_per_token_head", asked_by="test")
    rows = [ask_wide(16, n, None, asked_by="test") for n in (8, 32)]
    rows.append(ask_wide(16, 16, eight, asked_by="test"))
    kept = Kept(tmp_path, {})
    both = replace(tuner, lesson=lesson, rows=[None, *rows], kept=kept, costs=Costs.GRADIENTS)
    formats = [KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT8_PER_TOKEN_HEAD]
    plans = both._plans_of_one_layer({(side, one): formats for side in Side for one in both.rows})
    readings = both._means("alone", plans, lesson.measured)
    estimates = both._estimates(plans)
    assert estimates.keys() == readings.keys()
    later = [key for key in readings if key[0] > 0]
    assert {key: estimates[key] / readings[key] for key in later} == pytest.approx(
        dict.fromkeys(later, 1.0), rel=0.5
    )
    for side in Side:
        for one in both.rows:
            costs = [
                (estimates[i, side, formats[0], one], i) for i, s in both.places() if s is side
            ]
            assert [i for _, i in sorted(costs, reverse=True)] == [0, 1, 2, 3]
    assert both._estimates(plans) == estimates, "kept, or drawn the same"


def test_estimated_costs_decide_a_policy_and_are_told(tuner: Tuner, tmp_path: Path) -> None:
    counts = (8, 16, 24, 32)
    rows = [None, *(ask_wide(16, n, None, asked_by="test") for n in counts)]
    one = replace(tuner, rows=rows, kept=Kept(tmp_path, {}), costs=Costs.GRADIENTS)
    options = one.options()
    assert list(options) == rows
    int4 = KVDtype.INT4_PER_TOKEN_HEAD
    for place in one.places():
        kl = [next(o.kl for o in options[some][place] if o.dtype is int4) for some in rows]
        assert kl == sorted(kl, reverse=True)
    for some in (rows[0], rows[1], rows[-1]):
        for side in Side:
            every = [place for place in one.places() if place[1] is side]
            plan = one._narrow_plans[side, int4, some]
            key = side, int4, some
            together = one._means(f"check-{key}", {key: plan}, one.lesson.whole)[key]
            total = sum(next(o.kl for o in options[some][p] if o.dtype is int4) for p in every)
            assert total == pytest.approx(together, rel=1e-6), "step 1 is measured"
    tuned = one.for_bits(9.0)
    assert tuned.policy.bits <= 9.0
    assert tuned.policy.figures.kld_mean == pytest.approx(tuned.policy.predicted, rel=1.0)
    geometry = tuner.llm.planned.target.geometry
    assert report(tuned, geometry, "tiny")["costs"] == "gradients"
    assert "estimated from gradients" in policy_text(tuned, geometry, "tiny", "kvant tune")


_RECURRENT, _LATENTS = "qwen3_5_text", "deepseek_v3"
_SHORT = ("--context", "64", "--tokens", "64", "--verify-tokens", "128")


def _build(family: str, directory: Path) -> Path:
    if family not in (_RECURRENT, _LATENTS):
        return tiny_chat.build(directory, family=family)
    families.build(family, directory / family)
    return directory / family


def _loads_nothing(*_: object, **__: object) -> None:
    raise AssertionError("weights were loaded before the refusal")


@pytest.mark.parametrize(
    ("family", "why", "environment"),
    [
        ("gemma2", "attention of layer 0 has a soft cap", {}),
        ("gpt_oss", "attention of layer 0 has sinks", {}),
        ("gemma3n", "layer 2 reads the rows of layer 0", {}),
        ("qwen3_moe", "which experts", {}),
        (_RECURRENT, "recurrent layers", {}),
        ("llama", "round weights or activations", {"KVANT_QUANTIZATION": "int8"}),
    ],
)
def test_models_without_gradients_are_refused_before_they_are_loaded(
    family: str,
    why: str,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = _build(family, tmp_path)
    monkeypatch.setattr(LLM, "from_config", _loads_nothing)
    asked = ("tune", path, "--budget", "8bits", "--costs", "gradients", *_SHORT)
    ran = kvant(*asked, env=environment)
    assert (ran.code, ran.out) == (2, "")
    assert f"--costs gradients is not available for {path} here\n  why: " in ran.err
    assert why in ran.err
    assert "way out: measure each cost: --costs measured\n" in ran.err
    assert ran.err.count("way out") == 1


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3n"])
def test_models_without_gradients_are_tuned_with_measured_costs(
    family: str, tmp_path: Path
) -> None:
    words = tmp_path / "words.txt"
    words.write_text(" ".join(f"{i}: the open sea, measured twice." for i in range(30)))
    text = ("--text", words, "--kv-format", "int4_per_token_head", "--beside", "fp8")
    cache = {"KVANT_CACHE": str(tmp_path / "cache")}
    asked = ("tune", _build(family, tmp_path), "--budget", "8bits", *_SHORT, *text)
    ran = kvant(*asked, "--costs", "measured", "--format", "json", env=cache)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["policy"]["bits"] <= 8


def test_gradients_for_a_gpu_are_refused_by_the_plan(llm: LLM) -> None:
    request = PlanRequest(str(llm.model_path), DeviceFacts(DeviceKind.CUDA, "sm_90"))
    planned = plan_of(request)
    check_tunable(planned, Costs.MEASURED)
    with pytest.raises(NotServable, match="--costs gradients is not available for") as fault:
        check_tunable(planned, Costs.GRADIENTS)
    assert "runs on a GPU" in fault.value.why
    measured, on_cpu = (way.arguments for way in fault.value.ways_out)
    assert measured == ("--costs", "measured")
    assert on_cpu == ("--device", "cpu")
    check_tunable(plan_of(replace(request, device=DeviceFacts(DeviceKind.CPU))), Costs.GRADIENTS)


@pytest.mark.parametrize("costs", list(Costs))
def test_latents_are_refused_before_they_are_loaded(
    costs: Costs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _build(_LATENTS, tmp_path)
    monkeypatch.setattr(LLM, "from_config", _loads_nothing)
    ran = kvant("tune", path, "--budget", "8bits", "--costs", costs.value, *_SHORT)
    assert ran.code == 2
    assert f"{path} cannot be tuned: it stores one latent instead of K and V" in ran.err
    assert "way out: compare formats for all layers: kvant eval" in ran.err


def test_wide_rows_that_no_layer_can_store_are_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _build("mistral", tmp_path)
    monkeypatch.setattr(LLM, "from_config", _loads_nothing)
    ran = kvant("tune", path, "--budget", "8bits", "--kv-recent-tokens", "16", *_SHORT)
    assert ran.code == 2
    assert f"--kv-recent-tokens 16: no layer of {path} can store wide rows" in ran.err


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_gradients_of_other_families(family: str, tmp_path: Path) -> None:
    """Norms of heads, and windows."""
    llm = LLM(tiny_chat.build(tmp_path, family=family), dtype="float32", kv_cache_memory="2MiB")
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"{i}: the sea, the open sea, measured twice." for i in range(60)))
    lesson = divide_text(read_text(text, llm), llm, 128, 512, 128)
    int8 = KVDtype.INT8_PER_TOKEN_HEAD
    formats = [(side, int8) for side in Side]
    tuner = Tuner(llm, lesson, formats, Kept(tmp_path, {}), lambda *_: None)
    plans = tuner._plans_of_one_layer({(side, None): [int8] for side in Side})
    readings = tuner._means("alone", plans, lesson.measured)
    estimates = tuner._estimates(plans)
    later = [key for key in readings if key[0] > 0]
    assert {key: estimates[key] / readings[key] for key in later} == pytest.approx(
        dict.fromkeys(later, 1.0), rel=0.5
    )
