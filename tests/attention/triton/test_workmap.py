"""How a step's work is cut, under the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed here")

import triton
import triton.language as tl

from kvant.attention.launching import Shape
from kvant.attention.triton.cut import items_aimed_at
from kvant.attention.triton.workmap import tiles_per_split

GROUP, TILE = 4, 64


@triton.jit
def _cut(out, cu, lengths, num_seqs, target, least,
         GROUP: tl.constexpr, TILE: tl.constexpr, SEARCH: tl.constexpr):  # fmt: skip
    per = tiles_per_split(
        cu, lengths, num_seqs, 0, target, least, GROUP, 16, TILE, True, False, SEARCH
    )
    tl.store(out, per)


def cut(lengths: list[int], target: int, least: int = 1, *, search: bool = True) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.zeros(1, dtype=torch.int32, device=device)
    cu = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    kv = torch.tensor(lengths, dtype=torch.int32, device=device)
    _cut[(1,)](out, cu, kv, len(lengths), target, least, GROUP=GROUP, TILE=TILE, SEARCH=search)
    return int(out)


def items(lengths: list[int], per: int) -> int:
    return sum(-(-max(1, -(-n // TILE)) // per) for n in lengths)


def test_one_long_sequence_among_short_ones_has_no_longer_items_than_equal_ones() -> None:
    skewed, equal = [131072] + [4096] * 31, [8064] * 32
    longest = 32  # 126 tiles in 4
    assert -(-126 // -(-126 // cut(equal, 100))) == longest
    assert cut(skewed, 100) == longest
    assert cut(skewed, 100, search=False) == 41


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 20000), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(1, 5),
)
def test_items_never_exceed_the_grid(lengths: list[int], target: int, least: int) -> None:
    per = cut(lengths, target, least)
    assert per >= least
    assert items(lengths, per) <= max(target + len(lengths), items(lengths, least))
    assert per <= cut(lengths, target, least, search=False)


def test_batches_of_more_than_one_vector_of_lengths_are_counted_whole() -> None:
    lengths = [4096] * 200
    per = cut(lengths, 200)
    assert per == 32  # two items each: exactly the grid
    assert items(lengths, per) == 400


PROGRAMS = Shape(rows=16, tile=64, warps=1, stages=2, programs=8)


@pytest.mark.parametrize(
    ("blocks", "cut_into"), [(2, 66), (16, 8), (40, 3), (64, 2), (72, 5), (128, 1), (256, 1)]
)
def test_equal_sequences_are_cut_so_that_whole_rounds_of_programs_fill_the_device(
    blocks: int, cut_into: int
) -> None:
    """132 multiprocessors of 8 programs, 8 KV heads: 132 items a round."""
    target = items_aimed_at(PROGRAMS, blocks, 132, 8)
    assert (blocks + target) // blocks == cut_into
    assert items([262144] * blocks, cut([262144] * blocks, target)) == cut_into * blocks


@given(st.integers(1, 2000), st.integers(1, 200), st.integers(1, 64))
def test_there_is_always_room_for_an_item_more_than_blocks(
    blocks: int, processors: int, heads: int
) -> None:
    for rows in (16, 64):
        shape = Shape(rows=rows, tile=64, warps=4, stages=2, programs=2)
        assert items_aimed_at(shape, blocks, processors, heads) >= 1
