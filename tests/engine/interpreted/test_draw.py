"""The GPU's kernels for drawing, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvant.sampling.sampler import FEW, Drawer, DrawParts, parts_for
from kvant.sampling.triton_draw import choose, draw_from_few, make_space, narrow

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_K = torch.inf


def both_ways(
    logits: Tensor, rows: list[int], wishes: list[list[float]]
) -> tuple[list[int], list[int]]:
    """Tokens by the kernels, and row by row on a CPU."""
    return both_ways_of_few(logits, rows, wishes)[:2]


def both_ways_of_few(
    logits: Tensor, rows: list[int], wishes: list[list[float]]
) -> tuple[list[int], list[int], list[int]]:
    """And whether few candidates were enough, where there is a filter."""
    numbers = torch.tensor(wishes, dtype=torch.float64)
    index = torch.tensor(rows)
    likeliest = logits.argmax(-1)[index]
    space = make_space(len(rows) + 3, logits.shape[1], DEVICE)
    for part in (space.state, space.parts, space.sums, space.peaks, space.held):
        part.fill_(torch.nan)  # parts that no row needs must not be read
    tokens = likeliest.to(DEVICE)
    given = logits.to(DEVICE), index.to(DEVICE), numbers.to(DEVICE), tokens, space
    parts = DrawParts(
        partial(draw_from_few, *given), partial(narrow, *given, by_share=False),
        partial(narrow, *given, by_share=True), partial(choose, *given),
    )  # fmt: skip
    expected = likeliest.clone()
    drawer = Drawer(len(rows), logits.shape[1], torch.device("cpu"))
    for one in (parts, drawer.parts(logits, index, numbers, expected)):
        for run in one.of(parts_for(numbers)):
            run()
    return tokens.tolist(), expected.tolist(), space.drawn[: len(rows)].tolist()


def some_logits(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(12, size, generator=generator) * 3
    logits[3, ::2] = -torch.inf
    logits[4, 1:] = -torch.inf
    logits[5] = 0.25
    logits[6, size // 2 :] = -torch.inf
    logits[7] = (logits[7] * 2).round() / 2  # many equals, zeros of both signs among them
    logits[8] -= 100.0
    return logits


KEPT = (
    (NO_K, 1.0, 0.0), (NO_K, 0.9, 0.0), (7.0, 1.0, 0.0), (NO_K, 1.0, 0.05), (50.0, 0.8, 0.0),
    (2000.0, 0.95, 0.001), (1.0, 1.0, 0.0), (20.0, 0.001, 1.0), (1e9, 0.999, 0.0),
)  # fmt: skip
ROWS = (3, 4, 5, 6, 7, 7, 8, 11, 0, 0)
HEATS = (1.0, 1.0, 1.0, 0.7, 1.0, 0.3, 2.0, 2.0, 0.1, 1e-300)
SHARES = (0.0, 0.3, 0.62, 0.999)


@pytest.mark.parametrize("size", [5, 5000])
def test_they_draw_what_is_drawn_row_by_row_on_a_cpu(size: int) -> None:
    """Every filter on some rows, every row with some filters."""
    wishes = [[HEATS[i % 10], *KEPT[i % 9], SHARES[i % 4]] for i in range(18)]
    found, expected = both_ways(some_logits(size), [ROWS[i % 10] for i in range(18)], wishes)
    assert found == expected


def test_logits_in_float64_are_drawn_from_as_well() -> None:
    """Models in float64 run on GPUs too, on the reference backend."""
    wishes = [[HEATS[i % 10], *KEPT[i % 9], SHARES[i % 4]] for i in range(9)]
    found, expected = both_ways(some_logits(300).double(), [ROWS[i] for i in range(9)], wishes)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_so_do_all_rows_with_all_filters(kept: tuple[float, float, float]) -> None:
    wishes = [[heat, *kept, SHARES[i % 4]] for i, heat in enumerate(HEATS)]
    found, expected = both_ways(some_logits(9000), list(ROWS), wishes)
    assert found == expected


@pytest.mark.skipif(DEVICE.type == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("spread", [0.3, 1.3, 4.0])
def test_so_do_rows_of_a_large_vocabulary(spread: float) -> None:
    logits = torch.randn(16, 151_936, generator=torch.Generator().manual_seed(1)) * spread
    shares = torch.rand(9 * 16, generator=torch.Generator().manual_seed(2)).tolist()
    wishes = [[(0.6, 1.0, 1.7)[i % 3], *KEPT[i // 16], shares[i]] for i in range(9 * 16)]
    found, expected = both_ways(logits, list(range(16)) * 9, wishes)
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1


def test_rows_ask_for_different_things_beside_each_other() -> None:
    logits = some_logits(9000)
    wishes = [
        [0.0, NO_K, 1.0, 0.0, 0.4], [1.0, NO_K, 1.0, 0.0, 0.4], [0.8, 3.0, 0.95, 0.0, 0.4],
        [0.8, NO_K, 0.95, 0.0, 0.4], [1.3, 40.0, 1.0, 0.1, 0.4], [0.0, NO_K, 1.0, 0.0, 0.4],
    ]  # fmt: skip
    rows = [9, 10, 11, 0, 1, 2]
    found, expected = both_ways(logits, rows, wishes)
    assert found == expected
    assert found[0] == int(logits[9].argmax())
    for row, wish, token in zip(rows, wishes, found, strict=True):
        alone, _ = both_ways(logits, [row], [wish])
        assert alone == [token]


def test_rows_that_are_no_numbers_keep_what_they_have() -> None:
    logits = some_logits(5000)
    logits[0, 7] = torch.nan
    logits[1, 4999] = torch.inf
    logits[2] = -torch.inf
    found, expected = both_ways(logits, [0, 1, 2, 9], [[1.0, 30.0, 0.9, 0.01, 0.99]] * 4)
    assert found == expected
    assert found[:3] == logits.argmax(-1)[:3].tolist()


def test_a_small_top_k_needs_no_search_of_the_row_for_any_logits() -> None:
    logits = some_logits(9000)
    logits[9] = (logits[9] / 4).round()  # thousands of equals
    logits[10, 100:200] += 50.0  # the likeliest stand together
    rows = [3, 4, 5, 8, 9, 9, 10, 10]
    wishes = [[1.0, float(FEW - 13 * i % FEW), (1.0, 0.9)[i % 2], 0.0, 0.99] for i in range(8)]
    found, expected, few = both_ways_of_few(logits, rows, wishes)
    assert found == expected
    assert few == [1] * 8


def test_few_candidates_tell_what_top_p_leaves_unless_it_leaves_too_many() -> None:
    logits = some_logits(40_000)
    logits[0] *= 0.1
    logits[2] = torch.arange(40_000) % 9 / 8
    rows, heats = [0, 1, 1, 2, 8, 8], [1.0, 0.7, 0.3, 1.0, 0.7, 0.001]
    wishes = [[heat, NO_K, 0.9, 0.0, 0.7] for heat in heats]
    found, expected, few = both_ways_of_few(logits, rows, wishes)
    assert found == expected
    assert few == [0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9])
def test_of_equals_at_the_edge_the_smaller_ids_are_kept(top_p: float) -> None:
    """So that a token that is kept is drawn, and the one behind it is not."""
    size = 10_000
    logits = torch.zeros(1, size)
    last = round(top_p * size) - 1
    found, expected = both_ways(logits, [0, 0], [[1.0, NO_K, top_p, 0.0, 1 - 2**-53]] * 2)
    assert found == expected == [last, last]
    found, _ = both_ways(logits, [0], [[1.0, 4500.0, 1.0, 0.0, 1 - 2**-53]])
    assert found == [4499]
