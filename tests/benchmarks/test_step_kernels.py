"""`python -m benchmarks.step_kernels`: times and gaps of a step's kernels add up to the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import device_idle
from benchmarks.step_kernels import (
    Piece,
    measure,
    one_layer,
    placed,
    products_of,
    shares,
    short_name,
    table,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from kvant import LLM
from kvant.measure import throughput
from kvant.measure.throughput import parse_load
from kvant.models.quantization import Quantization, format_of
from tests.models import tiny

_PIECES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.integers(0, 12)), min_size=1
)


@given(_PIECES)
def test_own_times_and_gaps_are_the_whole_time(pieces: list[tuple[str, int, int]]) -> None:
    order = placed(Piece(name, begin, begin + length) for name, begin, length in pieces)
    found = shares(order, 2)
    span = max(one.end for one in order) - min(one.begin for one in order)
    assert sum(one.own_us + one.gap_us for one in found) == pytest.approx(span / 2)
    assert sum(one.launches for one in found) == len(pieces) / 2


def test_a_kernel_counts_from_the_end_of_earlier_work() -> None:
    found = {
        one.name: one
        for one in shares([Piece("a", 0, 10), Piece("b", 4, 13), Piece("c", 20, 22)], 1)
    }
    assert (found["b"].own_us, found["b"].length_us, found["b"].early_us) == (3, 9, 6)
    assert (found["c"].own_us, found["c"].gap_us, found["c"].early_us) == (2, 7, 0)


def test_launches_are_counted_from_the_mark_of_each_layer() -> None:
    names = ["rotate_and_store", "few_rows", "few_rows", "Memcpy HtoD (Pinned -> Device)"] * 2
    order = placed(Piece(name, place, place + 1) for place, name in enumerate(names))
    assert [one.name for one in order][:4] == [
        "rotate_and_store", "few_rows#1", "few_rows#2", "Memcpy HtoD ",
    ]  # fmt: skip
    assert [one.name for one in order][4:6] == ["rotate_and_store", "few_rows#1"]
    assert one_layer(order)[0] == ("rotate_and_store", -1, 0)
    assert one_layer(order)[-1] == ("rotate_and_store", 3, 4)


def test_attention_that_rotates_itself_is_a_mark_too() -> None:
    names = ["one_query", "product", "few", "product", "few"] * 3
    pieces = [Piece(name, place, place + 1) for place, name in enumerate(names)]
    assert [one.name for one in placed(pieces)][5:] == [
        "one_query", "product#1", "few#1", "product#2", "few#2",
    ] * 2  # fmt: skip
    assert [name for name, *_ in one_layer(pieces)] == [
        "one_query", "product#1", "few#1", "product#2", "few#2", "one_query",
    ]  # fmt: skip


def test_rotation_and_the_attention_behind_it_mark_one_layer() -> None:
    names = ["rotate_and_store", "one_query", "product"] * 3
    pieces = [Piece(name, place, place + 1) for place, name in enumerate(names)]
    assert [name for name, *_ in one_layer(pieces)] == [
        "rotate_and_store", "one_query", "product#1", "rotate_and_store",
    ]  # fmt: skip


def test_the_head_is_the_fourth_of_five_behind_the_last_layer() -> None:
    names = ["rotate_and_store", *["few_rows"] * 4, "rotate_and_store", *["few_rows"] * 5]
    order = placed(Piece(name, place, place + 1) for place, name in enumerate(names))
    assert [one.name for one in order][-5:] == [
        "few_rows#1", "few_rows#2", "few_rows#3", "few_rows#head", "few_rows#4",
    ]  # fmt: skip
    found = products_of(one.name for one in order)
    assert found["few_rows#head"] == "head"
    assert found["few_rows#4"] == "qkv"


def test_the_head_is_found_among_three_products_of_a_layer_too() -> None:
    layer = ["one_query", "product", "product", "few", "product"]
    names = [*layer, *layer, *layer[:-1], "product", "product", *layer]
    order = placed(Piece(name, place, place + 1) for place, name in enumerate(names))
    assert [one.name for one in order][10:16] == [
        "one_query", "product#1", "product#2", "few#1", "product#head", "product#3",
    ]  # fmt: skip


def test_a_kernel_that_runs_four_times_a_layer_has_the_layers_products() -> None:
    found = products_of([f"few_rows#{n}" for n in (1, 2, 3, 4)] + ["gate#1", "other#1", "other#2"])
    assert found == {
        "few_rows#1": "output", "few_rows#2": "gate_up", "few_rows#3": "down", "few_rows#4": "qkv",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("few_rows", "few_rows"),
        ("void at::native::unrolled_elementwise_kernel<a::B, 4>(int)", "unrolled_elementwise_kernel"),
        ("void (anonymous namespace)::softmax<float>(float*)", "softmax"),
    ],
)  # fmt: skip
def test_names_lose_arguments_and_namespaces(name: str, expected: str) -> None:
    assert short_name(name) == expected


def test_steps_of_both_kinds_are_recorded_with_the_bytes_of_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded(device: torch.device, step: Callable[[], object], steps: int) -> object:
        for _ in range(steps):
            step()
        names = ["rotate_and_store", "paged_attention", *["few_rows"] * 4]
        return [
            SimpleNamespace(
                name=name, device_type=DeviceType.CUDA, is_user_annotation=False,
                time_range=SimpleNamespace(start=2.0 * place, end=2.0 * place + 2.0),
            )
            for place, name in enumerate(names * 2 * steps)
        ], 0.1  # fmt: skip

    monkeypatch.setattr(device_idle, "recorded", recorded)
    monkeypatch.setattr(throughput, "decode_limit", lambda *given: 100.0)
    llm = LLM(
        tiny.build("llama", tmp_path), dtype="float32", device="cpu", quantization="int8",
        max_num_seqs=8, max_num_batched_tokens=16, enable_prefix_caching=False,
    )  # fmt: skip
    few, mixed, many = measure(llm, [parse_load("1x20/32"), parse_load("8x64/32")], 4, 2.0)
    assert [one["steps"]["kind"] for one in (few, mixed, many)] == [
        "decodes", "prompts and decodes", "decodes",
    ]  # fmt: skip
    kernels = {one["product"]: one for one in few["steps"]["kernels"]}
    config = llm.planned.target.config
    rows, columns = config["hidden_size"], config["intermediate_size"]
    expected = format_of(Quantization.INT8, columns).matrix_bytes(rows, columns)
    assert kernels["down"]["bytes"] == expected
    assert kernels["down"]["gb_s"] == pytest.approx(expected / 2.0 / 1e3)
    assert few["steps"]["us"] == pytest.approx(2.0 * 12)
    assert "| few_rows#3 down | 2.0 | 4.0 |" in table(few)
    assert not llm.engine.has_work


def test_without_a_profiler_there_is_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "decode_limit", lambda *given: 100.0)
    llm = LLM(tiny.build("llama", tmp_path), dtype="float32", device="cpu")
    with pytest.raises(RuntimeError, match="steps run on the CPU"):
        list(measure(llm, [parse_load("1x20/8")], 1, 2.0))
