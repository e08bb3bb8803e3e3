"""Weights whose inputs are reordered (act-order) equal compressed-tensors' own numbers, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvant.errors import BadCheckpoint
from kvant.weights.codecs import NarrowWeight, can_join, decode, encode, join, rows_of
from kvant.weights.dialects import read, read_order
from kvant.weights.format import Dialect, Scheme, int4_groups, int8_groups

GOLDEN = json.loads(Path(__file__).with_name("act_order.json").read_text())
FORMATS = {
    "int4": int4_groups(32),
    "int4 zero points": int4_groups(32, zero_points=True),
    "int8": int8_groups(32),
}
GPTQ = Scheme(Dialect.GPTQ, int4_groups(32, zero_points=True), reordered=True)


def tensor(stored: dict[str, Any]) -> Tensor:
    data = torch.frombuffer(bytearray.fromhex(stored["data"]), dtype=torch.uint8)
    found: Tensor = data.view(getattr(torch, stored["dtype"])).view(stored["shape"])
    return found


@pytest.mark.parametrize("case", FORMATS)
def test_numbers_are_those_of_the_release_that_read_such_weights(case: str) -> None:
    tensors = {name: tensor(stored) for name, stored in GOLDEN[case].items()}
    expected = tensors.pop("numbers")
    scheme = Scheme(Dialect.PACK_QUANTIZED, FORMATS[case], reordered=True)
    made = read("layer", scheme, *expected.shape, tensors)
    assert made.order is not None
    found = decode(made, expected.dtype)
    assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))
    in_order = read(
        "layer", Scheme(Dialect.PACK_QUANTIZED, FORMATS[case]), *expected.shape, tensors
    )
    assert not torch.equal(decode(in_order, expected.dtype), expected)


def reordered(rows: int, seed: int = 0, columns: int = 128) -> NarrowWeight:
    generator = torch.Generator().manual_seed(seed)
    made = encode(torch.randn(rows, columns, generator=generator), int4_groups(32))
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(3)).int()
    return NarrowWeight(made.format, rows, columns, made.codes, made.scales, order=order)


def test_weights_with_one_order_are_joined_and_others_are_not() -> None:
    parts = [reordered(8), reordered(16, seed=1)]
    whole = join(parts)
    assert torch.equal(decode(whole), torch.cat([decode(part) for part in parts]))
    assert torch.equal(decode(rows_of(whole, 8, 16)), decode(parts[1]))
    plain = encode(torch.randn(8, 128), int4_groups(32))
    other = NarrowWeight(
        plain.format, 8, 128, plain.codes, plain.scales, order=torch.arange(128).flip(0).int()
    )
    for clash in ([parts[0], other], [plain, other], [other, plain]):
        assert not can_join(clash)


def test_an_order_counts_as_bytes_of_its_weight() -> None:
    weight = reordered(8)
    assert weight.num_bytes == weight.format.matrix_bytes(8, 128) + 4 * 128


def test_groups_that_are_neighbours_or_unmarked_need_no_order() -> None:
    ascending = (torch.arange(128) // 32).int()
    for index in (ascending, torch.full((128,), -1, dtype=torch.int32)):
        assert read_order("x.g_idx", index, GPTQ) is None
    found = read_order("x.g_idx", ascending.flip(0), GPTQ)
    assert found is not None
    assert found.dtype is torch.int32
    np.testing.assert_array_equal(
        found, [*range(96, 128), *range(64, 96), *range(32, 64), *range(32)]
    )


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (5, 4, "x.g_idx names the group 4: 128 inputs have 4 groups of 32"),
        (5, -1, "x.g_idx names the group -1"),
        (5, 2, "x.g_idx gives 33 inputs to the group 2: each group has 32"),
    ],
)
def test_groups_that_are_none_are_refused_by_name(place: int, value: int, says: str) -> None:
    index = (torch.arange(128) // 32).flip(0).int()
    index[place] = value
    with pytest.raises(BadCheckpoint) as refused:
        read_order("x.g_idx", index, GPTQ)
    assert f"{refused.value.what}: {refused.value.why}".startswith(says)
    assert refused.value.ways_out


@pytest.mark.parametrize(
    ("dialect", "says"),
    [(Dialect.GPTQ, '"desc_act": true'), (Dialect.PACK_QUANTIZED, '"actorder": "group"')],
)
def test_an_order_that_nothing_declares_is_refused_with_the_declaration(
    dialect: Dialect, says: str
) -> None:
    index = (torch.arange(128) // 32).flip(0).int()
    with pytest.raises(BadCheckpoint, match=r"x\.g_idx reorders the inputs") as refused:
        read_order("x.g_idx", index, Scheme(dialect, int4_groups(32)))
    assert says in refused.value.ways_out[0].text
