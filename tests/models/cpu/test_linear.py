"""Products with stored weights, held to the definition in float64 and to themselves bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.models.cpu.linear import Linear, refuse_shape
from kvant.models.cpu.weights import Code, pack, unpack

SHAPES = [(4, 32), (70, 96), (192, 576), (576, 1536)]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_the_definitions_up_to_float32_sums(
    code: Code, shape: tuple[int, int]
) -> None:
    weight, bias, x = pack(numbers(0, *shape), code), numbers(1, shape[0]), numbers(2, 15, shape[1])
    size = x.abs().double() @ unpack(weight).abs().double().T + 1
    for given in (bias, None):
        wide = None if given is None else given.double()
        expected = F.linear(x.double(), unpack(weight).double(), wide)
        error = (Linear(weight, given)(x) - expected).abs()
        assert (error / size).max() < 3e-7


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_on_any_number_of_threads(
    code: Code, shape: tuple[int, int]
) -> None:
    linear = Linear(pack(numbers(0, *shape), code), numbers(1, shape[0]))
    x = numbers(2, 40, shape[1])
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(40)])
    for count in (1, 2):
        torch.set_num_threads(count)
        for rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 19, 40):
            assert torch.equal(linear(x[:rows]), alone[:rows])
            assert torch.equal(linear(x[40 - rows :]), alone[40 - rows :])


def test_int8_keeps_what_lies_on_its_grid() -> None:
    codes = torch.randint(-127, 128, (8, 64), generator=torch.Generator().manual_seed(0))
    codes[:, 0] = 127
    weight = codes.float() * 2.0 ** torch.arange(-4, 4)[:, None]
    assert torch.equal(unpack(pack(weight, Code.INT8)), weight)


def test_int4_keeps_what_lies_on_its_grid() -> None:
    codes = torch.randint(0, 16, (8, 3, 32), generator=torch.Generator().manual_seed(0))
    codes[..., 0], codes[..., 31] = 0, 15
    weight = (codes * 0.125 - torch.arange(3)[:, None]).reshape(8, 96)
    assert torch.equal(unpack(pack(weight, Code.INT4)), weight)


@pytest.mark.parametrize(("code", "steps"), [(Code.INT8, 254), (Code.INT4, 15)], ids=str)
def test_rounding_errs_by_half_a_step_at_most(code: Code, steps: int) -> None:
    weight = numbers(0, 16, 256)
    groups = weight if code is Code.INT8 else weight.view(-1, 32)
    width = 2 * groups.abs().amax(1) if code is Code.INT8 else groups.amax(1) - groups.amin(1)
    error = (unpack(pack(weight, code)) - weight).view(groups.shape).abs().amax(1)
    slack = 1e-6 if code is Code.INT8 else 2e-3  # scales and offsets in float16
    assert (error <= width / steps / 2 + slack * groups.abs().amax(1)).all()


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_weights_of_zeros_and_of_one_number_are_kept(code: Code) -> None:
    weight = torch.cat((torch.zeros(4, 32), torch.full((4, 32), -0.75)))
    torch.testing.assert_close(unpack(pack(weight, code)), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_what_is_not_a_number_stays_in_its_row(code: Code) -> None:
    x = numbers(2, 9, 64)
    x[4, 7] = torch.nan
    out = Linear(pack(numbers(0, 12, 64), code), None)(x)
    assert out[4].isnan().all()
    assert not out[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


@pytest.mark.parametrize(("shape", "says"), [((8, 48), "48 inputs"), ((3, 64), "3 outputs")])
def test_shapes_without_a_kernel_are_refused_with_the_reason(
    shape: tuple[int, int], says: str
) -> None:
    assert says in (refuse_shape(*shape) or "")
    assert refuse_shape(4, 64) is None


@pytest.mark.parametrize("code", [Code.INT8, Code.INT4], ids=lambda code: code.name)
def test_for_no_rows_no_weight_is_decoded(code: Code) -> None:
    linear = Linear(pack(numbers(0, 12, 64), code), None)
    linear(numbers(1, 1, 64))
    linear._scratch.fill_(torch.nan)
    assert linear(numbers(1, 0, 64)).shape == (0, 12)
    assert linear._scratch.isnan().all()
