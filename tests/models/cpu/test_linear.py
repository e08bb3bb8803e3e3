"""Products with stored weights, held to the definition in float64 and to themselves bit for bit."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kvant.kernels.cpu.block import address
from kvant.models.cpu.embedding import PackedEmbedding
from kvant.models.cpu.layout import Product, Round
from kvant.models.cpu.linear import Linear, refuse_shape, rounded_rows, rounding
from kvant.models.cpu.rounding import EIGHT_BITS, EXACT
from kvant.models.cpu.verify import verify_cpu_products
from kvant.models.cpu.weights import INT4, Code, PackedWeight, narrow_of, pack, pack_narrow, unpack
from kvant.weights.blocks import read_blocks
from kvant.weights.codecs import decode, encode
from kvant.weights.format import BLOCK_TYPES, Scale, int4_groups
from tests.weights.test_blocks import blocks

SHAPES = [(4, 32), (70, 96), (192, 576), (576, 1536)]
ROUNDED = [Code.INT8, Code.Q8_0, Code.Q4_0, Code.Q4_1]
STORED = [code for code in Code if code.name in BLOCK_TYPES]
NUMBERS = [Code.FLOAT32, Code.BFLOAT16]
CASES = [(code, shape) for code in (*NUMBERS, *ROUNDED) for shape in SHAPES]
CASES += [(code, shape) for code in (Code.Q4_K, Code.Q6_K) for shape in ((21, 256), (64, 768))]


def weight_of(code: Code, shape: tuple[int, int]) -> PackedWeight:
    """Random numbers, or random blocks where a format is read and not made."""
    if code in (Code.Q4_K, Code.Q6_K):
        return stored(code, shape)
    if code is Code.BFLOAT16:
        return pack(numbers(0, *shape).to(torch.bfloat16), code)
    return pack(numbers(0, *shape), code)


def stored(code: Code, shape: tuple[int, int]) -> PackedWeight:
    kind = BLOCK_TYPES[code.name]
    return pack_narrow(read_blocks(kind, torch.from_numpy(blocks(kind, *shape)), shape[1]))


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("code", "shape"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_a_product_is_the_definitions_up_to_float32_sums(
    code: Code, shape: tuple[int, int]
) -> None:
    weight, bias, x = weight_of(code, shape), numbers(1, shape[0]), numbers(2, 15, shape[1])
    size = x.abs().double() @ unpack(weight).abs().double().T + 1
    for added in (bias, None):
        wide = None if added is None else added.double()
        expected = F.linear(x.double(), unpack(weight).double(), wide)
        error = (Linear(weight, added)(x) - expected).abs()
        assert (error / size).max() < 5e-7


@pytest.mark.parametrize(("code", "shape"), CASES, ids=lambda x: getattr(x, "name", str(x)))
@pytest.mark.parametrize("digits", [EXACT, EIGHT_BITS])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_on_any_number_of_threads(
    code: Code, shape: tuple[int, int], digits: int
) -> None:
    linear = Linear(weight_of(code, shape), numbers(1, shape[0]), digits)
    x = numbers(2, 70, shape[1])
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(70)])
    for count in (1, 2):
        torch.set_num_threads(count)
        for rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 19, 70):
            assert torch.equal(linear(x[:rows]), alone[:rows])
            assert torch.equal(linear(x[70 - rows :]), alone[70 - rows :])


@given(
    rows=st.integers(0, 40),
    outputs=st.integers(4, 90),
    blocks_of_32=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)  # the first example compiles the kernels
def test_a_bfloat16_weight_gives_the_bits_of_the_same_numbers_in_float32(
    rows: int, outputs: int, blocks_of_32: int, seed: int
) -> None:
    stored = numbers(seed, outputs, 32 * blocks_of_32).to(torch.bfloat16)
    stored.view(-1)[seed % stored.numel()] = (torch.inf, torch.nan, 1e-40, -0.0)[seed % 4]
    x = numbers(seed + 1, rows, 32 * blocks_of_32)
    found = Linear(pack(stored, None), None)(x)
    expected = Linear(pack(stored.to(torch.float32), None), None)(x)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert Linear(pack(stored, None), None).weight.codes.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("rows", [1, 5, 17])
def test_results_are_rounded_to_bfloat16_where_that_is_asked(rows: int) -> None:
    linear = Linear(pack(numbers(0, 21, 64).to(torch.bfloat16), None), numbers(1, 21))
    x = numbers(2, rows, 64)
    x[0, 0] = torch.nan
    expected, out = linear(x), torch.empty(rows, 21)
    work = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
    task = linear.task(x, out, 1, to_bf16=True)
    task[Product.ROWS // 8] = rows
    work(int(task[Product.WORKER // 8]))(address(task), 0)
    torch.testing.assert_close(
        out, expected.to(torch.bfloat16).to(torch.float32), rtol=0, atol=0, equal_nan=True
    )


def as_rounded(x: Tensor, digits: int) -> Tensor:
    """x as products take it, read from the bytes of rounded rows."""
    rows, columns = x.shape
    out = rounded_rows(rows, columns, digits)
    task = rounding(x, out, columns, digits)
    task[Round.ROWS // 8] = rows
    work = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(int(task[Round.WORKER // 8]))
    work(address(task), 0)
    parts = out.view(rows, columns // 32, -1).numpy()
    read = parts[..., : 32 * digits].view(np.int8).reshape(rows, -1, digits, 32).astype(np.float64)
    whole = sum(read[:, :, k] * 256.0 ** (digits - 1 - k) for k in range(digits))
    scale = np.ascontiguousarray(parts[..., 32 * digits : 32 * digits + 4]).view(np.float32)
    return torch.from_numpy((whole * scale).reshape(rows, columns))


def test_activations_of_eight_bits_are_the_nearest_of_255_steps_and_products_are_theirs() -> None:
    x = numbers(2, 9, 96) * torch.logspace(-3, 3, 9)[:, None]
    seen = as_rounded(x, EIGHT_BITS)
    largest = x.view(9, 3, 32).abs().amax(-1).double()
    error = (seen - x).abs().view(9, 3, 32).amax(-1)
    assert (error <= largest / 127 / 2 * (1 + 1e-6)).all()
    weight = pack(numbers(0, 70, 96), Code.Q4_0)
    expected = seen @ unpack(weight).double().T
    size = seen.abs() @ unpack(weight).abs().double().T
    assert ((Linear(weight, None, EIGHT_BITS)(x) - expected).abs() / size).max() < 3e-7


def test_activations_are_kept_to_their_last_bits_unless_eight_are_asked_for() -> None:
    x = numbers(2, 9, 96) * torch.logspace(-3, 3, 9)[:, None]
    largest = x.view(9, 3, 32).abs().amax(-1).double()
    error = (as_rounded(x, EXACT) - x).abs().view(9, 3, 32).amax(-1)
    assert (error <= largest * 2.0**-22).all()


@pytest.mark.parametrize("digits", [EXACT, EIGHT_BITS])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_inputs_in_another_order_give_the_product_of_the_same_numbers(
    rows: int, digits: int
) -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(4)).to(torch.int32)
    weight = encode(numbers(0, 70, 96), int4_groups(32, zero_points=True))
    packed = pack_narrow(replace(weight, order=order))
    assert torch.equal(unpack(packed)[:, order], decode(weight))
    x = numbers(2, rows, 96)
    expected = Linear(pack_narrow(weight), None, digits)(x[:, order])
    found = Linear(packed, None, digits)(x)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("code", STORED, ids=lambda code: code.name)
def test_bytes_in_tiles_are_the_same_weight(code: Code) -> None:
    kind = BLOCK_TYPES[code.name]
    given = read_blocks(kind, torch.from_numpy(blocks(kind, 37, 512)), 512)
    packed = pack_narrow(given)
    assert torch.equal(decode(narrow_of(packed)), decode(given))
    assert packed.num_bytes == kind.format.matrix_bytes(48, 512)  # whole tiles


@pytest.mark.parametrize("columns", [32, 64, 128])
@pytest.mark.parametrize("scale", [Scale.FLOAT16, Scale.BFLOAT16, Scale.FLOAT32])
@pytest.mark.parametrize("zero_points", [False, True])
def test_groups_of_checkpoints_get_offsets_and_are_the_same_numbers(
    columns: int, scale: Scale, zero_points: bool
) -> None:
    fmt = int4_groups(columns, zero_points=zero_points, scale=scale)
    given = encode(numbers(3, 37, 512), fmt)
    if scale is Scale.FLOAT32:  # as many bits as products of four bits with it can have
        given = replace(given, scales=given.scales.to(torch.bfloat16).to(torch.float32))
    packed = pack_narrow(given)
    assert torch.equal(decode(narrow_of(packed)), decode(given))
    x = numbers(5, 3, 512)
    expected = x.double() @ decode(given).double().T
    assert (Linear(packed, None)(x) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("code", STORED, ids=lambda code: code.name)
def test_an_embedding_is_decoded_as_the_codec_does_bit_for_bit(code: Code) -> None:
    weight = stored(code, (37, 512))
    ids = torch.tensor([[0, 36, 5], [17, 17, 31]])
    assert torch.equal(PackedEmbedding(weight)(ids), unpack(weight)[ids])


def test_int8_keeps_what_lies_on_its_grid() -> None:
    codes = torch.randint(-127, 128, (8, 64), generator=torch.Generator().manual_seed(0))
    codes[:, 0] = 127
    weight = codes.float() * 2.0 ** torch.arange(-4, 4)[:, None]
    assert torch.equal(unpack(pack(weight, Code.INT8)), weight)


def test_int4_keeps_what_lies_on_its_grid() -> None:
    codes = torch.randint(0, 16, (8, 3, 32), generator=torch.Generator().manual_seed(0))
    codes[..., 0], codes[..., 31] = 0, 15
    weight = (codes * 0.125 - torch.arange(3)[:, None]).reshape(8, 96)
    assert torch.equal(unpack(pack(weight, INT4)), weight)


@pytest.mark.parametrize(("code", "steps"), [(Code.INT8, 254), (INT4, 15)], ids=str)
def test_rounding_errs_by_half_a_step_at_most(code: Code, steps: int) -> None:
    weight = numbers(0, 16, 256)
    groups = weight if code is Code.INT8 else weight.view(-1, 32)
    width = 2 * groups.abs().amax(1) if code is Code.INT8 else groups.amax(1) - groups.amin(1)
    error = (unpack(pack(weight, code)) - weight).view(groups.shape).abs().amax(1)
    slack = 1e-6 if code is Code.INT8 else 2e-3  # scales and offsets in float16
    assert (error <= width / steps / 2 + slack * groups.abs().amax(1)).all()


@pytest.mark.parametrize("code", [Code.FLOAT32, Code.INT8, INT4], ids=lambda code: code.name)
def test_weights_of_zeros_and_of_one_number_are_kept(code: Code) -> None:
    weight = torch.cat((torch.zeros(4, 32), torch.full((4, 32), -0.75)))
    torch.testing.assert_close(unpack(pack(weight, code)), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("code", [*NUMBERS, *ROUNDED], ids=lambda code: code.name)
@pytest.mark.parametrize("digits", [EXACT, EIGHT_BITS])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_a_number_stays_in_its_row(code: Code, digits: int, bad: float) -> None:
    x = numbers(2, 9, 64)
    x[4, 7] = bad
    out = Linear(weight_of(code, (12, 64)), None, digits)(x)
    assert not out[4].isfinite().any()
    assert not out[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


@pytest.mark.parametrize(("shape", "says"), [((8, 48), "48 inputs"), ((3, 64), "3 outputs")])
def test_shapes_without_a_kernel_are_refused_with_the_reason(
    shape: tuple[int, int], says: str
) -> None:
    assert says in (refuse_shape(*shape) or "")
    assert refuse_shape(4, 64) is None


def test_a_weight_of_zeros_gives_zeros() -> None:
    x = numbers(2, 3, 64).abs()
    for code in ROUNDED:
        assert not Linear(pack(torch.zeros(16, 64), code), None)(x).any()


def test_verify_judges_every_kind_of_weights_in_every_way() -> None:
    cells = list(verify_cpu_products())
    assert len(cells) == 3 + 2 * (len(Code) - 2)
    assert len({(cell.name, cell.way) for cell in cells}) == len(cells)
    assert all(cell.is_right for cell in cells)
    assert all(error > 0 for cell in cells for error in cell.errors)
