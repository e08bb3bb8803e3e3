"""What a recorded step does before and after the model in few launches equals plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvant.execution.device_state import DeviceState
from kvant.execution.graphs import lay_out
from kvant.execution.triton_step import gather_pages, most_likely, plain_step, write_pages
from kvant.kernels.listed_pages import listed
from kvant.kernels.triton.zero import PageEraser

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, COLUMNS, PAGE = 9, 50, 16


def some_state() -> DeviceState:
    torch.manual_seed(0)
    state = DeviceState(ROWS, COLUMNS, DEVICE)
    state.tokens.copy_(torch.randint(0, 1000, (ROWS + 1,)))
    state.lengths.copy_(torch.randint(0, COLUMNS * PAGE, (ROWS + 1,)))
    state.pages.copy_(torch.randint(1, 99, (ROWS + 1, COLUMNS)))
    return state


def test_a_plain_step_is_laid_out_as_one_without_drafts() -> None:
    state = some_state()
    given = [
        torch.tensor(one, device=DEVICE)
        for one in (
            [4, ROWS, 0, 8, 2, ROWS],  # rows, in no order; padding has the last one
            [-1, 0, 77, -1, 5, 0],  # tokens
            [5, 0, -1, 16, -1, 0],  # starts
            [1, 0, 1, 1, 1, 0],  # counts
            [900, 0, 900, 16, 900, 0],  # limits; the fourth sequence stands at its own
        )
    ]
    tables = [torch.zeros(6, COLUMNS, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    ids, found = plain_step(*given, state, tables[0][None], PAGE, 800)
    tokens, expected, *_ = lay_out(*given, state, tables[1][None], 0, PAGE, 800)
    is_there = (given[3] > 0) & torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.bool, device=DEVICE)
    assert found.seqlens_kv[3] == 0
    assert ids[is_there].tolist() == tokens[is_there].tolist()
    for name in ("cu_seqlens_q", "seqlens_kv", "slot_mapping", "positions"):
        a, b = getattr(found, name), getattr(expected, name)
        assert a.dtype is b.dtype, name
        assert a.tolist() == b.tolist(), name
    for row, length in enumerate(found.seqlens_kv.tolist()):
        used = -(-length // PAGE)
        assert found.page_table[row, :used].tolist() == expected.page_table[row, :used].tolist()
        assert not found.page_table[row, used:].any()
    assert (found.max_seqlen_q, found.max_seqlen_kv) == (1, 800)


def test_changed_page_ids_are_written_and_gathered() -> None:
    state = some_state()
    before = state.pages.clone()
    index = torch.tensor([3 * COLUMNS + 7, -1, 0, 8 * COLUMNS + 49], device=DEVICE)
    values = torch.tensor([111, 222, 333, 444], device=DEVICE)
    write_pages(state, index, values)
    before[3, 7], before[0, 0], before[8, 49] = 111, 333, 444
    assert state.pages.tolist() == before.tolist()
    table = torch.full((3, COLUMNS), -5, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([8, 3, 0], device=DEVICE)
    lengths = torch.tensor([COLUMNS * PAGE, 7 * PAGE + 1, 0], dtype=torch.int32, device=DEVICE)
    gather_pages(state, rows, lengths, table[None], PAGE)
    assert table[0].tolist() == before[8].tolist()
    assert table[1, :8].tolist() == before[3, :8].tolist()
    assert table[1, 8:].eq(-5).all()
    assert table[2].eq(-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [7, 4096, 9001])
def test_the_most_likely_token_is_the_first_of_the_largest_and_unsound_rows_are_reported(
    size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, size, device=DEVICE).to(dtype)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 2] = logits[3, size - 1] = 50.0
    logits[4, size - 1] = torch.inf
    logits[5, size - 1] = 60.0
    state = some_state()
    rows = torch.tensor([6, 0, 3, 8, 1, 2, ROWS], device=DEVICE)
    positions = 10 * torch.arange(7, device=DEVICE)
    untouched = state.tokens[[4, 5, 7]].tolist()
    counts = torch.ones_like(rows)
    sound, tokens = most_likely(logits, rows, positions, counts, state).view(2, 7)
    expected = torch.isfinite(logits.max(-1).values)
    assert sound.tolist() == expected.tolist() == [1, 0, 0, 1, 0, 1, 1]
    assert tokens[expected].tolist() == logits.argmax(-1)[expected].tolist()
    assert tokens[3] == 2
    assert ((tokens >= 0) & (tokens < size)).all()
    assert state.tokens[rows].tolist() == tokens.tolist()
    assert state.lengths[rows].tolist() == (positions + 1).tolist()
    assert state.tokens[[4, 5, 7]].tolist() == untouched
    wide = torch.promote_types(dtype, torch.float32)
    kept = torch.full((9, size + 3), 5.0, dtype=wide, device=DEVICE)
    again = most_likely(logits, rows, positions, counts, state, kept[:7, :size]).view(2, 7)
    assert again.tolist() == [sound.tolist(), tokens.tolist()]
    torch.testing.assert_close(kept[:7, :size], logits.to(wide), rtol=0, atol=0, equal_nan=True)
    assert kept[7:].eq(5).all()
    assert kept[:, size:].eq(5).all()
    some = torch.full((7, size), 5.0, dtype=wide, device=DEVICE)
    wanted = torch.tensor([0, 1, 0, 1, 1, 0, 0], device=DEVICE)
    again = most_likely(logits, rows, positions, counts, state, some, wanted).view(2, 7)
    assert again.tolist() == [sound.tolist(), tokens.tolist()]
    assert some[wanted == 0].eq(5).all()
    torch.testing.assert_close(
        some[wanted > 0], kept[:7, :size][wanted > 0], rtol=0, atol=0, equal_nan=True
    )
    counts[3] = 0
    before = state.tokens.tolist(), state.lengths.tolist()
    sound, tokens = most_likely(logits, rows, 2 * positions, counts, state).view(2, 7)
    assert tokens[3] == -1
    assert sound[3] == 1
    assert state.tokens[8] == before[0][8]
    assert state.lengths[8] == before[1][8]


def test_listed_pages_of_several_groups_are_cleared() -> None:
    """A step's list has zeros behind its pages; pages of unequal sizes lie in each group."""
    generator = torch.Generator().manual_seed(5)
    groups = [
        [
            torch.randint(1, 255, (9, width), generator=generator, dtype=torch.uint8).to(DEVICE)
            for _ in range(count)
        ]
        for count, width in ((2, 2800), (1, 4096))
    ]
    expected = [[piece.clone() for piece in pieces] for pieces in groups]
    pages = [[3, 8], [2]]
    entries = torch.tensor([*listed(pages), 0, 0], device=DEVICE)
    PageEraser(groups).clear_listed(entries)
    for pieces, wanted, cleared in zip(groups, expected, pages, strict=True):
        for piece, before in zip(pieces, wanted, strict=True):
            before[cleared] = 0
            assert torch.equal(piece, before)
