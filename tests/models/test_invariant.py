"""In batch-invariant mode every family's logits are, bit for bit, the same in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.attention.reference.backend import ReferenceBackend
from kvant.errors import NotServable
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.invariant import linear as linear_module
from kvant.models.invariant.linear import TiledLinear
from kvant.models.invariant.mode import RowByRow
from kvant.models.invariant.vectors import by_whole_vectors
from kvant.models.loaded import LoadedModel
from tests.attention import driver
from tests.models import loading, tiny

CPU = torch.device("cpu")
NOT_RUNNABLE = "mimo_v2_flash"
TEXT = [(7 * i + i * i) % 120 + 3 for i in range(45)]
OTHERS = [[(5 * i + j) % 120 + 3 for i in range(9 + 4 * j)] for j in range(3)]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(576, 192), (68, 36)])
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    linear = TiledLinear()
    weight, bias = numbers(0, shape[1], shape[0]).to(dtype), numbers(1, shape[1]).to(dtype)
    x = numbers(2, 300, shape[0]).to(dtype)
    alone = torch.cat([linear(x[i : i + 1], weight, bias) for i in range(300)])
    for count in (2, 7, 8, 9, 33, 63, 100, 257, 300):
        assert torch.equal(linear(x[:count], weight, bias), alone[:count])
        assert torch.equal(linear(x[300 - count :], weight, bias), alone[300 - count :])
    assert torch.equal(linear(x.view(3, 100, -1), weight, bias), alone.view(3, 100, -1))
    assert linear(x[:0], weight, bias).shape == (0, shape[1])
    torch.testing.assert_close(alone, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)


def test_plain_products_do_depend_on_the_number_of_rows() -> None:
    weight, x = numbers(0, 192, 576), numbers(2, 300, 576)
    alone = torch.cat([F.linear(x[i : i + 1], weight) for i in range(300)])
    assert not torch.equal(F.linear(x, weight), alone), "then the tiles would be of no use"


def test_a_machine_on_which_rows_are_not_alike_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x @ weight.t()
        out[-1] *= 1 + 1e-6
        return out

    monkeypatch.setattr(linear_module.F, "linear", careless)
    with pytest.raises(NotServable, match="cannot be promised"):
        TiledLinear().prove(numbers(0, 16, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_an_element_has_the_same_function_value_wherever_it_stands(dtype: torch.dtype) -> None:
    x = (numbers(0, 40000) * 3).to(dtype)
    for function in (F.silu, F.gelu, torch.sigmoid, torch.exp, torch.rsqrt):
        whole = by_whole_vectors(function, x)
        for start, end in ((0, 1), (1, 18), (3, 70), (5, 33000), (17, 40000)):
            part = by_whole_vectors(function, x[start:end])
            assert torch.equal(part.nan_to_num(), whole[start:end].nan_to_num())


def test_a_number_to_the_power_of_an_element_has_the_same_bits_wherever_it_stands() -> None:
    x = numbers(0, 4000)
    with RowByRow(TiledLinear(), "SomeModel"):
        whole = 0.3**x
        parts = {(start, end): 0.3 ** x[start:end] for start, end in ((0, 1), (1, 18), (17, 4000))}
    for (start, end), part in parts.items():
        assert torch.equal(part, whole[start:end])
    torch.testing.assert_close(whole, 0.3**x)


def load(family: str, where: Path, dtype: KVDtype, *, mode: bool = True) -> LoadedModel:
    path = tiny.build(family, where)
    geometry = tiny.geometry(family)
    plan = driver.plan(geometry.layers, dtype, compute=ComputeDtype.FLOAT32)
    return loading.load(path, plan, geometry, batch_invariant=mode)


def logits(model: LoadedModel, chunks: list[int], others: list[list[int]]) -> Tensor:
    """Return the logits of every token of TEXT, read in these chunks; others come with the first chunk."""
    pool = driver.pool(model.plan, 40)
    backend = ReferenceBackend(batch_invariant=model.batch_invariant)
    run = driver.Driver(pool, backend)
    text = driver.Text(TEXT)
    beside = [driver.Text(other) for other in others]
    found = []
    for number, chunk in enumerate(chunks):
        work = [(other, len(other.tokens)) for other in beside] if number == 0 else []
        before = sum(count for _, count in work)
        ids, call, _ = run.call([*work, (text, chunk)])
        found.append(model.forward(ids, call, torch.arange(before, before + chunk)))
    return torch.cat(found)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES.keys() - {NOT_RUNNABLE}))
def test_no_familys_logits_depend_on_chunks_or_neighbours(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path, KVDtype.INT8_PER_TOKEN_HEAD)
    alone = logits(model, [45], [])
    assert torch.equal(logits(model, [45], OTHERS), alone)
    assert torch.equal(logits(model, [7] * 6 + [3], OTHERS[:1]), alone)
    assert torch.equal(logits(model, [1] * 45, []), alone)


def test_outside_the_mode_logits_do_depend_on_chunks(tmp_path: Path) -> None:
    model = load("llama", tmp_path, KVDtype.INT8_PER_TOKEN_HEAD, mode=False)
    alone = logits(model, [45], [])
    assert not torch.equal(logits(model, [1] * 45, []), alone)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_the_mode_computes_the_same_model(family: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    plain = load(family, tmp_path / "a", KVDtype.FLOAT32, mode=False)
    (tmp_path / "b").mkdir()
    found = logits(load(family, tmp_path / "b", KVDtype.FLOAT32), [45], [])
    torch.testing.assert_close(found, logits(plain, [45], []), rtol=1e-3, atol=1e-4)


def test_an_operation_that_is_not_known_to_keep_rows_apart_is_refused_by_name() -> None:
    x = numbers(0, 8, 16)
    with RowByRow(TiledLinear(), "SomeModel"), pytest.raises(NotServable) as refused:
        torch.linalg.inv(x[:, :8])
    assert "SomeModel" in str(refused.value)
    assert "inv" in str(refused.value)
    with RowByRow(TiledLinear(), "SomeModel"), pytest.raises(NotServable, match="sum"):
        x.sum()
