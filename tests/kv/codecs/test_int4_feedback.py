"""int4_feedback with matrices that are not zero: bytes, a second definition, and what it is good for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant.kv.codecs import codec_for
from kvant.kv.codecs.rotation import rotate
from kvant.kv.dtype import KVDtype
from kvant.measure.calibration.feedback import RIDGE, feedback_of, unit_upper
from tests.kv.codecs.comparison import plane_bytes, same_bytes
from tests.kv.codecs.golden import GOLDEN, ROWS
from tests.kv.codecs.oracle import int4_feedback

CODEC = codec_for(KVDtype.INT4_FEEDBACK)
PLAIN = codec_for(KVDtype.INT4_PER_TOKEN_HEAD)
MATRIX = [[((3 * i + 5 * j) % 7 - 3) / 8 if j > i else 0.0 for j in range(16)] for i in range(16)]
BYTES = {
    "ordinary": "99d718598848f799",
    "constant": "f0ffffffffffffff",
    "outlier": "ffffffffffffffff",
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_stored_as_the_frozen_bytes(name: str) -> None:
    codes, scales = CODEC.encode(torch.tensor([ROWS[name]]), torch.tensor([MATRIX]))
    assert plane_bytes(codes).hex() == BYTES[name]
    assert plane_bytes(scales).hex() == GOLDEN[KVDtype.INT4_PER_TOKEN_HEAD].planes[name][1]


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=16, max_size=16),
    st.lists(st.floats(-1, 1, width=32), min_size=16, max_size=16),
)
def test_every_row_agrees_with_the_second_definition(row: list[float], line: list[float]) -> None:
    matrix = [[line[(i + j) % 16] if j > i else 0.0 for j in range(16)] for i in range(16)]
    planes = CODEC.encode(torch.tensor([row]), torch.tensor([matrix]))
    expected = int4_feedback(row, matrix)
    assert tuple(plane_bytes(plane) for plane in planes) == expected.planes
    decoded = CODEC.decode(planes, None, torch.float32)
    assert decoded[0].tolist() == expected.values


def test_each_head_has_its_own_matrix_and_nan_stays_in_its_row() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 16)
    x[3, 1, 4] = torch.nan
    matrices = torch.stack((torch.zeros(16, 16), torch.tensor(MATRIX)))
    planes = CODEC.encode(x, matrices)
    assert same_bytes([p[:, 0] for p in planes], [p[:, 0] for p in PLAIN.encode(x, None)])
    alone = CODEC.encode(x[:, 1:], matrices[1:])
    assert same_bytes([p[:, 1:] for p in planes], alone)
    decoded = CODEC.decode(planes, None, torch.float32)
    assert decoded[3, 1].isnan().all()
    assert not decoded[:3].isnan().any()


def second_moment(size: int) -> torch.Tensor:
    """Queries with a few strong directions, in the rotated basis."""
    torch.manual_seed(4)
    q = torch.randn(4000, size) * torch.linspace(0.1, 3, size) ** 2
    q += torch.randn(4000, 1) * torch.randn(size)
    q = rotate(q).double()
    return q.T @ q / len(q)


def test_the_factor_gives_back_the_second_moment() -> None:
    moment = second_moment(16)
    upper = unit_upper(moment)
    assert torch.equal(upper, upper.triu())
    assert upper.diagonal().tolist() == pytest.approx([1.0] * 16)
    inverse = torch.linalg.inv(upper)
    ridged = moment + RIDGE * moment.diagonal().mean() * torch.eye(16)
    middle = inverse @ ridged @ inverse.T
    off = middle - middle.diagonal().diag()
    assert off.abs().max() < 1e-9 * middle.diagonal().max()


@pytest.mark.parametrize("size", [16, 64])
def test_scores_of_the_queries_err_much_less(size: int) -> None:
    """e^T H e, by brute force over rows, against plain rounding of the same rows."""
    moment = second_moment(size)
    x = torch.randn(400, 1, size)
    y = rotate(x[:, 0]).double()
    matrices = feedback_of(moment)[None]
    expected = []
    for codec, outside in ((PLAIN, None), (CODEC, matrices)):
        planes = codec.encode(x, outside)
        error = codec.decode_rotated(planes)[:, 0].double() - y
        expected.append(float(torch.einsum("ni,ij,nj->n", error, moment, error).mean()))
    plain, fed = expected
    assert fed < 0.6 * plain


def test_no_single_step_of_a_code_is_better_given_those_before() -> None:
    """Element i's term d_i (e_i + sum of U_ji e_j)^2 is least for the code that was chosen."""
    moment = second_moment(16)
    upper = unit_upper(moment)
    x = 0.5 * torch.randn(50, 1, 16)
    planes = CODEC.encode(x, feedback_of(moment)[None])
    found = CODEC.decode_rotated(planes)[:, 0].double()
    scale = (planes[1].view(torch.int32) & ~15).view(torch.float32).double()[:, 0]
    lowest = -(planes[1].view(torch.int32) & 15)[:, 0].double() * scale
    error = found - rotate(x[:, 0]).double()
    term = error @ upper
    for step in (-1, 1):
        moved = found + step * scale
        allowed = (moved >= lowest - 1e-6) & (moved <= lowest + 15 * scale + 1e-6)
        worse = (term + step * scale).abs() >= term.abs() - 1e-4
        assert (worse | ~allowed).all()
