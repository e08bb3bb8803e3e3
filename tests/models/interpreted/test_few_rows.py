"""Products that do what lies between them, against the same in plain torch; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.models.fused import few_rows
from kvant.models.fused.feed_forward import activate
from kvant.models.fused.few_rows import FewRows, Stream
from kvant.models.fused.recipe import Activation

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's bfloat16 is broken; compiled, float32 would be multiplied in another precision.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BOUND = 6e-3 if ON_GPU else 1e-5
EPS = 1e-6
pytestmark = [pytest.mark.gpu] if ON_GPU else []

TOKENS = [1, 2, 20] if not ON_GPU else [1, 2, 16, 17, 33, 64]
# hidden, intermediate, rows of the product of q, k and v; the last with columns in several parts.
# Interpreted those take half a minute for one token, a program a row.
WIDTHS = [(64, 96, 70), pytest.param((192, 320, 128), marks=() if ON_GPU else pytest.mark.slow)]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(DTYPE)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found.double() - expected).norm() < BOUND * expected.norm())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_layer_is_what_its_parts_are(
    widths: tuple[int, int, int], bias: bool, tokens: int
) -> None:
    hidden, inner, rows = widths
    few = FewRows(DEVICE, EPS)
    ids = torch.randint(0, 30, (tokens,), device=DEVICE)
    embedding, first, second = normal(30, hidden), *normal(2, hidden).abs()

    def product(out: int, into: int) -> tuple[Tensor, Tensor | None]:
        return normal(out, into, scale=into**-0.5), normal(out) if bias else None

    def apply(x: Tensor, weight: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, weight.double(), None if b is None else b.double())

    for _ in range(2):  # what programs count is as it was before
        qkv, output, gate_up, down = (
            product(rows, hidden), product(hidden, rows), product(2 * inner, hidden),
            product(hidden, inner),
        )  # fmt: skip
        stream = few.embed(ids, embedding, first)
        expected = embedding.double()[ids]
        assert close(stream.residual, expected)
        assert close(few.normed(stream, *qkv), apply(normed(expected, first), *qkv))

        attended = normal(tokens, rows)
        stream = few.added(attended, *output, stream, second)
        expected = expected + apply(attended.double(), *output)
        assert close(stream.residual, expected)

        x = few.normed(stream, *gate_up, gate=Activation.SILU)
        gate, up = apply(normed(stream.residual.double(), second), *gate_up).chunk(2, dim=-1)
        assert close(x, F.silu(gate) * up)

        after = few.added(x, *down, stream, first)
        assert close(after.residual, stream.residual.double() + apply(x.double(), *down))
        picked = torch.tensor([tokens - 1, 0], device=DEVICE)[:tokens]
        logits = few.normed(after, *qkv, picked=picked, dtype=torch.float32)
        assert logits.dtype is torch.float32
        assert close(logits, apply(normed(after.residual.double(), first), *qkv)[picked])
        assert few.normed(after, *qkv, picked=picked[:0]).shape == (0, rows)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("activation", Activation)
def test_rows_that_are_normalised_already_are_multiplied_as_they_are(
    activation: Activation, tokens: int
) -> None:
    few, x, weight, bias = FewRows(DEVICE, EPS), normal(tokens, 64), normal(70, 64), normal(70)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert close(few.ready(x, weight, bias), expected)
    assert close(few.ready(x, weight, None, dtype=torch.float32), expected - bias.double())
    gate, up = expected.chunk(2, dim=-1)
    assert close(few.ready(x, weight, bias, gate=activation), activate(gate, activation) * up)


def test_a_residual_sum_given_alone_is_normalised_by_its_reader() -> None:
    weight, norm = normal(70, 64), normal(64).abs()
    x = normal(1, 64)
    found = FewRows(DEVICE, EPS).normed(Stream(x, norm), weight, None)
    assert close(found, normed(x.double(), norm) @ weight.double().T)


@pytest.mark.parametrize("shared", [99 * 1024, 227 * 1024])
@pytest.mark.parametrize("tokens", [2, 64])
def test_tiles_fit_into_shared_memory(
    shared: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "shared_memory_of_a_program", lambda _: shared)
    few = FewRows(DEVICE, EPS)
    for kind in range(3):
        for rows in (4096, 24576):
            cut = few._cut(kind, tokens, torch.empty(rows, 4096, device="meta"))
            assert 2 * cut.stages * 128 * (64 + max(16, tokens)) <= shared
