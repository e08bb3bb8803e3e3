"""What lies between products, in Triton against the same in torch and float64; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.models.fused.kernels import WideTorchKernels
from kvant.models.fused.layers import Norm, QKNorms
from kvant.models.fused.recipe import Activation, NormKind, Pairing
from kvant.models.fused.triton_kernels import TritonKernels
from kvant.weights.codecs import round_activations
from kvant.weights.rounding import Rounding

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's bfloat16 is broken.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BOUND = 2e-2 if ON_GPU else 1e-5
WIDTH, HEADS, HEAD = (3840, (16, 8), 256) if ON_GPU else (70, (4, 2), 24)
TOKENS = [1, 33] if ON_GPU else [1, 3]
pytestmark = [pytest.mark.gpu] if ON_GPU else []

OURS, EXACT = TritonKernels(DEVICE), WideTorchKernels()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def norm_of(kind: NormKind, width: int, *, bias: bool = False) -> Norm:
    return Norm(kind, normal(width), normal(width) if bias else None, 1e-6)


def wide(norm: Norm) -> Norm:
    """The norm in float64. Where modules round in between does not matter there."""
    kind = NormKind.RMS_WIDE if norm.kind is NormKind.RMS else norm.kind
    weight = None if norm.weight is None else norm.weight.double()
    return Norm(kind, weight, None if norm.bias is None else norm.bias.double(), norm.eps)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found.double() - expected).norm() <= BOUND * expected.norm())


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", NormKind)
def test_norms_and_sums(kind: NormKind, tokens: int) -> None:
    x, residual = normal(tokens, WIDTH), normal(tokens, WIDTH)
    norm, before = (norm_of(kind, WIDTH, bias=not kind.is_rms) for _ in range(2))
    assert close(OURS.norm(x, norm), EXACT.norm(x.double(), wide(norm)))
    bare = Norm(kind, None, None, 1e-6)
    assert close(OURS.norm(x, bare), EXACT.norm(x.double(), bare))
    for first, then, factor in ((None, norm, 1.0), (before, norm, 0.5), (before, None, 1.0)):
        found = OURS.add_norm(x.clone(), residual.clone(), then, before=first, factor=factor)
        expected = EXACT.add_norm(
            x.double(), residual.double(), None if then is None else wide(then),
            before=None if first is None else wide(first), factor=factor,
        )  # fmt: skip
        assert all(close(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize("rotary", [0, HEAD // 2, HEAD])
@pytest.mark.parametrize("kind", [None, NormKind.RMS, NormKind.RMS_WIDE, NormKind.RMS_ONE])
def test_rotations_of_parts_of_heads(kind: NormKind | None, rotary: int, pairing: Pairing) -> None:
    tokens = TOKENS[-1]
    qkv = normal(tokens, (HEADS[0] + 2 * HEADS[1]) * HEAD)
    angles = torch.rand(tokens, rotary // 2, device=DEVICE) * 6
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    norms = exact = None
    if kind is not None:
        norms = QKNorms(norm_of(kind, HEAD), norm_of(kind, HEAD))
        exact = QKNorms(wide(norms.q), wide(norms.k))
    expected = EXACT.rotate(qkv.double(), cos.double(), sin.double(), *HEADS, exact, pairing)
    found = OURS.rotate(qkv.clone(), cos, sin, *HEADS, norms, pairing)
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize("heads", [3, 20])
def test_latents_and_the_rotations_beside_them(heads: int, pairing: Pairing) -> None:
    tokens, head, latent, rotary = TOKENS[-1], 24, 40, 8
    both = normal(tokens, heads * head + latent + rotary)
    q, row = both[:, : heads * head].view(tokens, heads, head), both[:, heads * head :]
    norm, angles = norm_of(NormKind.RMS, latent), torch.rand(tokens, rotary // 2, device=DEVICE) * 6
    expected = EXACT.rotate_latent(
        q.double(), row.double(), wide(norm), angles.cos().double(), angles.sin().double(), pairing
    )
    found = OURS.rotate_latent(q, row, norm, angles.cos(), angles.sin(), pairing)
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.RMS_WIDE])
def test_norms_of_all_heads_together(kind: NormKind) -> None:
    q_width, k_width = HEADS[0] * HEAD, HEADS[1] * HEAD
    qkv = normal(TOKENS[-1], q_width + 2 * k_width)
    norms = QKNorms(norm_of(kind, q_width), norm_of(kind, k_width), whole=True)
    exact = QKNorms(wide(norms.q), wide(norms.k), whole=True)
    expected = EXACT.norm_whole(qkv.double(), q_width, k_width, exact)
    assert close(OURS.norm_whole(qkv.clone(), q_width, k_width, norms), expected)


@pytest.mark.parametrize("activation", Activation)
def test_activations(activation: Activation) -> None:
    x = 3 * normal(TOKENS[-1], 2 * WIDTH)
    assert close(OURS.activate(x, activation), EXACT.activate(x.double(), activation))
    assert close(OURS.gate(x, activation), EXACT.gate(x.double(), activation))


@pytest.mark.parametrize(
    "how", [Rounding(), Rounding(group=128), Rounding(scale=torch.tensor([0.037]))]
)
def test_rows_are_rounded_behind_norms_and_gates_as_the_definition_says(how: Rounding) -> None:
    width, tokens = 3 * 128 if not ON_GPU else 96 * 128, TOKENS[-1]
    rounding = Rounding(how.group, None if how.scale is None else how.scale.to(DEVICE))
    x, residual, gate_up = normal(tokens, width), normal(tokens, width), normal(tokens, 2 * width)
    x[0], residual[0], gate_up[0] = 0, 0, 0
    norm = norm_of(NormKind.RMS, width)
    normed, total = OURS.add_norm(x.clone(), residual.clone(), norm, factor=0.5)
    rounded, added = OURS.add_norm_rounded(x, residual, norm, rounding, factor=0.5)
    assert torch.equal(added, total)
    gated = OURS.gate(gate_up, Activation.SILU)
    for found, rows in (
        (rounded, normed),
        (OURS.gate_rounded(gate_up, Activation.SILU, rounding), gated),
    ):
        expected = round_activations(rows, rounding)
        assert torch.equal(found.scales, expected.scales)
        assert found.dtype == DTYPE
        assert found.codes.shape == rows.shape
        if ON_GPU:  # the interpreter encodes e4m3 otherwise
            assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))


def test_steps_without_tokens_launch_nothing() -> None:
    nothing = normal(0, WIDTH)
    norm = norm_of(NormKind.RMS, WIDTH)
    assert OURS.norm(nothing, norm).shape == nothing.shape
    assert OURS.gate(nothing, Activation.SILU).shape == (0, WIDTH // 2)


def test_gates_of_heads() -> None:
    gate = normal(5, 3, 2, HEAD)[:, :, 1]
    x = normal(5, 3 * HEAD)
    expected = EXACT.gate_heads(x.double(), gate.double())
    assert close(OURS.gate_heads(x, gate), expected)
