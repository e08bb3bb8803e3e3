"""Long prompts are multiplied by what was measured fastest, everything else as before."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kvant.models.fused import fastest, products
from kvant.models.fused.cublas_lt import Algorithm, CublasLt, library
from kvant.models.fused.fastest import least, measured_for, measured_rows
from kvant.models.fused.products import Products
from kvant.models.order_of_sums import rows_for, weight_like


class FakeLibrary:
    """Multiplies as torch does and remembers how many rows; refuses where it is told to."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.refuses = False

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor, algorithm: Algorithm) -> bool:
        if self.refuses:
            return False
        self.rows.append(len(x))
        out.copy_(F.linear(x, weight))
        return True


def numbers(*shape: int) -> Tensor:
    """Rows that begin where the library wants them."""
    room = torch.randn(shape[0] * shape[1] + 128, dtype=torch.float32).to(torch.bfloat16)
    start = -room.data_ptr() % 256 // 2
    return room[start : start + shape[0] * shape[1]].view(shape)


@pytest.fixture
def fake() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def measured(fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> tuple[Products, Tensor]:
    """Products that found something for 2048 rows of a weight [64, 128], and that weight."""
    monkeypatch.setattr(
        products, "fastest", lambda lt, x, weight: Algorithm() if len(x) == 2048 else None
    )
    made, weight = Products(cast(CublasLt, fake), F.linear), numbers(64, 128)
    made.measure([weight], 4096)
    return made, weight


@pytest.mark.parametrize("rows", [1, 64, 1664, 1925, 1926, 2048, 2293, 2294, 3000, 4096, 5000])
def test_only_about_as_many_rows_as_were_measured_are_multiplied_otherwise(
    measured: tuple[Products, Tensor], fake: FakeLibrary, rows: int
) -> None:
    multiply, weight = measured
    x = numbers(rows, 128)
    assert torch.equal(multiply(x, weight, None), F.linear(x, weight))
    assert fake.rows == ([rows] if 1925 < rows < 2294 else [])  # for 4096 nothing was faster


def test_what_the_library_refuses_or_was_not_measured_for_is_multiplied_as_before(
    measured: tuple[Products, Tensor], fake: FakeLibrary
) -> None:
    multiply, weight = measured
    x, bias = numbers(2048, 128), numbers(1, 64)[0]
    assert torch.equal(multiply(x, weight, bias), F.linear(x, weight, bias))
    other = numbers(32, 128)
    assert torch.equal(multiply(x, other, None), F.linear(x, other))
    beside = numbers(2049, 128).view(-1)[64 : 64 + 2048 * 128].view(2048, 128)  # not aligned
    assert torch.equal(multiply(beside, weight, None), F.linear(beside, weight))
    columns = numbers(128, 2048).t()  # not contiguous
    assert torch.equal(multiply(columns, weight, None), F.linear(columns, weight))
    assert fake.rows == []
    fake.refuses = True
    assert torch.equal(multiply(x, weight, None), F.linear(x, weight))


def test_without_a_library_and_in_float32_nothing_is_measured(fake: FakeLibrary) -> None:
    weight = numbers(64, 128)
    for multiply in (Products(None, F.linear), Products(cast(CublasLt, fake), F.linear)):
        multiply.measure([weight.float()], 4096)
        x = torch.randn(2048, 128)
        assert torch.equal(multiply(x, weight.float(), None), F.linear(x, weight.float()))
    assert fake.rows == []


@given(st.integers(1, 40000), st.integers(1, 40000))
def test_a_size_is_measured_close_to_what_it_stands_for(most: int, rows: int) -> None:
    sizes = measured_rows(most)
    assert all(2048 <= size <= most for size in sizes)
    assert most < 2048 if sizes == [] else measured_for(most, sizes) is not None
    found = measured_for(rows, sizes)
    if found is None:
        assert all(not 0.95 * size <= rows <= 1.1 * size for size in sizes)
    else:
        assert 0.93 * found <= rows <= 1.13 * found
        assert all(abs(found - rows) <= abs(size - rows) for size in sizes)


def test_the_first_way_is_left_for_one_that_is_faster_by_a_hundredth() -> None:
    assert least([[10.0, 10.0, 30.0], [9.0, 9.5, 9.0]]) == 1
    assert least([[10.0, 10.0, 10.0], [9.95, 9.95, 1.0]]) == 0
    assert least([[1.0]]) == 0


@pytest.mark.parametrize("columns", [256, 257])
def test_products_that_show_the_order_of_sums_would_be_zero_if_exact(columns: int) -> None:
    weight = weight_like(torch.empty(3, columns))
    rows = rows_for(5, weight, seed=0)
    assert F.linear(rows.double(), weight.double()).abs().max() < 1e-12
    in_order = torch.zeros(5, 3)
    for column in range(columns):
        in_order += rows[:, column, None] * weight[:, column]
    assert in_order.abs().min() > 0
    assert not torch.equal(in_order, F.linear(rows, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_library_gives_torchs_bits_for_every_number_of_rows(dtype: torch.dtype) -> None:
    lt = library()
    assert lt is not None
    weight = weight_like(torch.empty(768, 512, dtype=dtype, device="cuda"))
    for rows in (2048, 2049, 2111, 2290):
        x = rows_for(rows, weight, seed=rows)
        found = lt.algorithms(rows, weight)
        assert found
        for algorithm in [*found, *lt.neighbours(found[0], rows, weight)]:
            out = torch.full((rows, 768), torch.nan, dtype=dtype, device="cuda")
            assert lt.multiply(x, weight, out, algorithm)
            assert (out - F.linear(x.double(), weight.double())).abs().max() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_measured_products_have_the_bits_of_torchs(dtype: torch.dtype) -> None:
    multiply = Products(library(), F.linear)
    torch.manual_seed(0)
    weights = [
        torch.randn(size, dtype=dtype, device="cuda") for size in ((4096, 1024), (768, 2048))
    ]
    multiply.measure(weights, 4096)
    for weight in weights:
        for rows in (1, 100, 1930, 2048, 2111, 3000, 4000, 4096, 4500):
            x = torch.randn(rows, weight.shape[1], dtype=dtype, device="cuda")
            assert torch.equal(multiply(x, weight, None), F.linear(x, weight)), rows


@pytest.mark.gpu
def test_an_algorithm_that_adds_in_another_order_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lt = library()
    assert lt is not None
    weight = weight_like(torch.empty(768, 512, dtype=torch.bfloat16, device="cuda"))
    x = rows_for(2048, weight, seed=0)
    monkeypatch.setattr(fastest, "_milliseconds", lambda run, times: next(clock))
    clock = iter(range(10_000, 0, -1))  # each way faster than the one before
    assert fastest.fastest(lt, x, weight) is not None

    class Other:
        """Adds the columns in the opposite order."""

        algorithms, neighbours = lt.algorithms, lt.neighbours

        def multiply(self, x: Tensor, weight: Tensor, out: Tensor, algorithm: Algorithm) -> bool:
            assert lt is not None
            return lt.multiply(x.flip(1), weight.flip(1), out, algorithm)

    assert fastest.fastest(cast(CublasLt, Other()), x, weight) is None
