"""Into what a layer's attention is cut: numbers alone, without a GPU and without Triton."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.attention.launching import Shape
from kvant.attention.need import FIXED_SPLIT
from kvant.attention.triton.cut import (
    FEWEST_JOINED,
    MOST_JOINED,
    MOST_SCANNED,
    NEVER_SPLIT,
    Cut,
    cut_step,
    wide_items_aimed_at,
)

FEW = Shape(rows=16, tile=32, warps=1, stages=2, programs=8)
MANY = Shape(rows=64, tile=64, warps=8, stages=4, programs=2)


def decode(num_seqs: int, shape: Shape = FEW, **changes: Any) -> Cut:
    """A step of one query a sequence on 132 multiprocessors."""
    given = {"tokens": num_seqs, "num_seqs": num_seqs, "max_seqlen_q": 1, "heads": 8, "group": 4}
    return cut_step(shape, **{**given, "multiprocessors": 132, "rotated": False, **changes})


@given(
    st.integers(1, 300), st.integers(1, 40), st.integers(1, 16), st.integers(1, 8), st.booleans(),
    st.sampled_from([FEW, MANY]),
)  # fmt: skip
def test_every_block_of_every_sequence_has_an_item(
    num_seqs: int, each: int, group: int, heads: int, rotated: bool, shape: Shape
) -> None:
    found = cut_step(
        shape, tokens=num_seqs * each, num_seqs=num_seqs, max_seqlen_q=each, heads=heads, group=group,
        multiprocessors=132, rotated=rotated,
    )  # fmt: skip
    needed = num_seqs * -(-each * group // shape.rows)
    assert found.items >= found.blocks >= needed
    assert found.parts or found.items == found.blocks, "items without parts are whole blocks"


def test_padding_and_sequences_that_are_shorter_than_the_longest_need_no_more_blocks_than_rows() -> (
    None
):
    assert decode(1000, tokens=40).blocks == 40
    assert decode(8, tokens=20, max_seqlen_q=13).blocks == 13


def test_a_device_that_blocks_fill_is_not_cut_further() -> None:
    whole = decode(600)
    assert (whole.least, whole.items, whole.parts) == (NEVER_SPLIT, 600, False)
    cut = decode(16)
    assert (cut.least, cut.parts) == (1, True)
    assert cut.items == cut.blocks + cut.target


def test_few_rows_of_many_heads_are_joined_by_the_kernel_itself() -> None:
    at_least = FEWEST_JOINED // 8
    assert [decode(n).join for n in (at_least - 1, at_least, MOST_SCANNED, MOST_SCANNED + 1)] == [
        0, 4, 4, 0,
    ]  # fmt: skip
    assert decode(16, max_seqlen_q=3, tokens=48).join == 16, "12 rows, to a power of two"
    assert decode(16, max_seqlen_q=5, tokens=80).join == 0, f"20 rows, more than {MOST_JOINED}"
    assert not decode(16).combines
    assert decode(1).combines


def test_rows_that_must_be_rotated_back_are_written_by_the_kernel_that_joins_parts() -> None:
    one = decode(600, rotated=True, max_seqlen_q=5, tokens=3000)
    assert (one.direct, one.parts, one.combines) == (False, True, True)
    joined = decode(16, rotated=True)
    assert (joined.direct, joined.combines) == (True, False)
    wide = decode(600, MANY, rotated=True, wide=True)
    assert (wide.direct, wide.join) == (True, 0)


def test_fixed_items_end_at_the_same_places_in_any_step() -> None:
    alone, among = (decode(n, fixed_seqlen_kv=5000) for n in (1, 256))
    assert alone.least == among.least == FIXED_SPLIT // FEW.tile
    assert alone.items == 5
    assert among.items == 5 * 256
    assert alone.parts_joined_at_once == among.parts_joined_at_once == (8, 1)
    assert alone.join == among.join == 0
    short = decode(1, fixed_seqlen_kv=FIXED_SPLIT)
    assert (short.items, short.parts) == (1, False)


def test_the_work_map_is_written_once_only_for_many_sequences_and_few_rows() -> None:
    assert [decode(n).listed for n in (MOST_SCANNED, MOST_SCANNED + 1)] == [False, True]
    assert not decode(200, MANY).listed
    assert not decode(200, wide=True).listed


def test_work_is_found_ahead_unless_the_launch_before_may_have_written_what_it_depends_on() -> None:
    assert decode(1).early
    assert decode(24).early
    assert not decode(MOST_SCANNED + 1).early
    assert not decode(1, fixed_seqlen_kv=4096).early


def test_a_cut_is_made_once_and_cannot_be_changed() -> None:
    assert decode(24) is decode(24)
    with pytest.raises(FrozenInstanceError):
        decode(24).items = 1  # type: ignore[misc]


def test_programs_for_many_rows_fill_the_device_whole_times() -> None:
    for blocks in (1, 2, 4, 16, 64, 256):
        waves = wide_items_aimed_at(MANY, blocks, 132, 8) * 8 / (132 * MANY.programs)
        assert waves / -(-waves // 1) > 0.9, blocks


def test_equal_blocks_that_fill_the_device_stay_whole_in_a_step_with_room_for_more() -> None:
    """A recorded step is launched for the most blocks it may have; a prompt of 512 tokens has 32."""
    tiles = 8
    for room in (33, 64, 96, 132):
        target = wide_items_aimed_at(MANY, room, 132, 8)
        for blocks in range(33, room + 1):
            assert -(-blocks * tiles // target) >= tiles, (room, blocks)


def test_a_long_piece_beside_answers_is_cut_for_the_device_and_not_for_the_room_of_its_step() -> (
    None
):
    """24 answers and 16 tokens behind 32,768 in a recorded step of 64 tokens and 32 sequences."""
    found = decode(32, MANY, tokens=64, max_seqlen_q=64, wide=True)
    tiles = [2] * 24 + [512]
    per = max(-(-sum(tiles) // found.target), found.least)
    parts = [-(-n // per) for n in tiles]
    assert sum(parts) <= found.items
    assert 16 <= parts[-1] <= 132 * MANY.programs // 8
    short = [2] * 24 + [8]
    assert max(-(-sum(short) // found.target), found.least) == 8, "what is short stays whole"
    equal = decode(32, MANY, tokens=32 * 16, max_seqlen_q=16, wide=True)
    assert (equal.target, equal.least) == (wide_items_aimed_at(MANY, equal.blocks, 132, 8), 1)


def test_cutting_needs_neither_torch_nor_triton() -> None:
    code = (
        "import sys\n"
        "import kvant.attention.triton.cut\n"
        "assert not {'torch', 'triton'} & set(sys.modules), 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
