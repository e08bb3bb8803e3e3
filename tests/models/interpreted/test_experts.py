"""Triton's layers of experts against float64 sums of all experts; interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.models.fused import triton_experts
from kvant.models.fused.experts import Clamp, Experts, GateOrder, TorchExperts
from kvant.models.fused.routing import Routing, Scoring, route
from kvant.models.fused.triton_experts import (
    Choice,
    FewTile,
    ManyTile,
    OneTile,
    TritonExperts,
    Unscored,
)
from kvant.weights.codecs import decode, encode_stack
from kvant.weights.format import (
    FP8_BLOCK,
    FP8_CHANNEL,
    INT8_CHANNEL,
    MXFP4,
    WeightFormat,
    int4_groups,
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's bfloat16 is broken.
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if ON_GPU else [])]
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
pytestmark = [pytest.mark.gpu] if ON_GPU else []

HIDDEN, WIDTH = 48, 40
SILU = (GateOrder.HALVES, None, False)
CLAMPED = (GateOrder.ALTERNATING, Clamp(7.0, 1.702), True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def make(
    count: int,
    top_k: int,
    kind: tuple[GateOrder, Clamp | None, bool] = SILU,
    dtype: torch.dtype = torch.float32,
) -> Experts:
    order, clamp, biased = kind

    def bias(*shape: int) -> Tensor | None:
        return normal(*shape, dtype=dtype) if biased else None

    return Experts(
        Routing(count, top_k),
        (normal(count, HIDDEN, dtype=dtype), bias(count)),
        (normal(count, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5, dtype=dtype), bias(count, 2 * WIDTH)),
        (normal(count, HIDDEN, WIDTH, scale=WIDTH**-0.5, dtype=dtype), bias(count, HIDDEN)),
        order, clamp,
    )  # fmt: skip


def choose(tokens: int, experts: Experts) -> Choice:
    """Experts of random tokens; the upper half of the experts is not used where top_k allows it."""
    routing = experts.routing
    used = max(routing.top_k, routing.num_experts // 2)
    ids = torch.stack([torch.randperm(used)[: routing.top_k] for _ in range(tokens)])
    return Choice(ids.to(DEVICE, torch.int32), torch.rand(ids.shape, device=DEVICE))


def results(x: Tensor, choice: Choice, experts: Experts) -> Tensor:
    """The definition in float64: weighted results [pairs, H]."""

    def apply(product: tuple[Tensor, Tensor | None], expert: int, row: Tensor) -> Tensor:
        weight, bias = product
        return F.linear(
            row, weight[expert].double(), None if bias is None else bias[expert].double()
        )

    found = []
    for row, ids, weights in zip(x.double(), choice.ids.tolist(), choice.weights, strict=True):
        for expert, weight in zip(ids, weights.double(), strict=True):
            both = apply(experts.gate_up, expert, row)
            if experts.order is GateOrder.HALVES:
                gate, up = both.chunk(2)
            else:
                gate, up = both[::2], both[1::2]
            if experts.clamp is None:
                h = F.silu(gate) * up
            else:
                limit = experts.clamp.limit
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                h = (up + 1) * gate * torch.sigmoid(experts.clamp.alpha * gate)
            found.append(weight * apply(experts.down, expert, h))
    return torch.stack(found)


def close(found: Tensor, expected: Tensor) -> bool:
    bound = BOUNDS[found.dtype]
    return bool((found.double() - expected).norm() <= bound * expected.norm())


CASES = [(1, 8, 2), (3, 8, 1), (17, 8, 4), (40, 4, 2),
         pytest.param(70, 128, 8, marks=() if ON_GPU else pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize(("tokens", "count", "top_k"), CASES)
def test_few_multiplies_each_pair_with_its_expert(
    tokens: int,
    count: int,
    top_k: int,
    kind: tuple[GateOrder, Clamp | None, bool],
    dtype: torch.dtype,
) -> None:
    experts = make(count, top_k, kind, dtype)
    x, choice = normal(tokens, HIDDEN, dtype=dtype), choose(tokens, experts)
    tiles = FewTile(16, depth=32), FewTile(16, depth=16)
    parts = TritonExperts(DEVICE).few(x, choice, experts, tiles)
    assert close(parts, results(x, choice, experts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize(("tokens", "count", "top_k"), CASES)
def test_many_multiplies_each_pair_with_its_expert(
    tokens: int,
    count: int,
    top_k: int,
    kind: tuple[GateOrder, Clamp | None, bool],
    dtype: torch.dtype,
) -> None:
    experts = make(count, top_k, kind, dtype)
    x, choice = normal(tokens, HIDDEN, dtype=dtype), choose(tokens, experts)
    tiles = ManyTile(16, 32, 16), ManyTile(16, 32, 16)
    parts = TritonExperts(DEVICE).many(x, choice, experts, tiles)
    assert close(parts, results(x, choice, experts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 8, 2), (1, 128, 8), (2, 8, 4)])
def test_single_rows_give_the_sum_of_their_experts(
    tokens: int,
    count: int,
    top_k: int,
    kind: tuple[GateOrder, Clamp | None, bool],
    dtype: torch.dtype,
) -> None:
    experts = make(count, top_k, kind, dtype)
    x, choice = normal(tokens, HIDDEN, dtype=dtype), choose(tokens, experts)
    residual = normal(tokens, HIDDEN, dtype=dtype)
    made = TritonExperts(DEVICE)
    h = made.one_gate_up(x, choice, experts, OneTile(16, 32))
    expected = results(x, choice, experts).view(tokens, top_k, -1).sum(1)
    assert close(made.one_down(h, choice, experts, tile=OneTile(16, 16)), expected)
    added = made.one_down(h, choice, experts, residual, OneTile(16, 64))
    assert close(added, expected + residual.double())


NARROW = [
    FP8_CHANNEL,
    FP8_BLOCK,
    INT8_CHANNEL,
    int4_groups(32),
    int4_groups(64, zero_points=True),
    MXFP4,
]


@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.summary.replace(" ", "-"))
@pytest.mark.parametrize("kind", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 8, 2), (17, 4, 2)])
def test_narrow_experts_are_those_of_their_decoded_weights(
    tokens: int,
    count: int,
    top_k: int,
    kind: tuple[GateOrder, Clamp | None, bool],
    fmt: WeightFormat,
) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    hidden, width = (128, 128) if fmt == FP8_BLOCK else (192, 64)
    wide = make(count, top_k, kind, dtype)
    stacks = [
        encode_stack(normal(count, *shape, scale=shape[1] ** -0.5), fmt)
        for shape in ((2 * width, hidden), (hidden, width))
    ]
    biases = normal(count, 2 * width, dtype=dtype), normal(count, hidden, dtype=dtype)
    if not kind[2]:
        biases = None, None  # type: ignore[assignment]
    numbers = [decode(one.whole, torch.float64).view(one.shape) for one in stacks]
    narrow, exact = (
        replace(wide, gate_up=(weights[0], biases[0]), down=(weights[1], biases[1]))
        for weights in (stacks, numbers)
    )
    x, choice = normal(tokens, hidden, dtype=dtype), choose(tokens, narrow)
    expected, made = results(x, choice, exact), TritonExperts(DEVICE)
    tiles = FewTile(16, rows=32), FewTile(16, rows=32)
    assert close(made.few(x, choice, narrow, tiles), expected)
    assert close(made.many(x, choice, narrow), expected)
    if ON_GPU:
        assert close(made.few(x, choice, narrow), expected)
    summed = expected.view(tokens, top_k, -1).sum(1)
    found = made.apply_chosen(x, choice.ids.long(), choice.weights, narrow)
    assert close(found, summed)
    invariant = TritonExperts(DEVICE, batch_invariant=True)
    assert close(invariant.apply_chosen(x, choice.ids, choice.weights, narrow), summed)


# The last part has fewer experts, and one expert has no pairs.
@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.summary.replace(" ", "-"))
def test_narrow_experts_with_many_pairs_are_decoded_in_parts(
    fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    count, top_k, hidden, width = 5, 2, 128, 128
    stacks = [
        encode_stack(normal(count, *shape, scale=shape[1] ** -0.5), fmt)
        for shape in ((2 * width, hidden), (hidden, width))
    ]
    numbers = [decode(one.whole, torch.float64).view(one.shape) for one in stacks]
    narrow, exact = (
        replace(make(count, top_k, SILU, dtype), gate_up=(up, None), down=(down, None))
        for up, down in (stacks, numbers)
    )
    monkeypatch.setattr(triton_experts, "MOST_DECODED", 2 * 2 * width * hidden)
    monkeypatch.setattr(triton_experts, "_FEWEST_DECODED", 4)
    made = TritonExperts(DEVICE)
    monkeypatch.setattr(made, "_copies_tiles", True)
    ids = torch.stack([torch.tensor([i % 4, (i + 1) % 4]) for i in range(23)]).to(DEVICE)
    choice = Choice(ids.to(torch.int32), torch.rand(23, top_k, device=DEVICE))
    x = normal(23, hidden, dtype=dtype)
    assert made._decodes(x, choice, narrow)
    assert close(made.many(x, choice, narrow), results(x, choice, exact))


# The last needs more chunks of pairs than a program sums at a time, and more experts.
@pytest.mark.parametrize(
    ("pairs", "count", "chunk"),
    [((1, 1), 8, 128), ((5, 2), 8, 128), ((200, 4), 8, 128), ((330, 4), 20, 2)],
)
def test_pairs_are_sorted_by_expert_in_their_order(
    pairs: tuple[int, int], count: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_experts, "_CHUNK", chunk)
    tokens, top_k = pairs
    experts = make(count, top_k)
    choice = choose(tokens, experts)
    order, ends = TritonExperts(DEVICE).sort(choice, experts.routing)
    ids = choice.ids.flatten().long()
    assert torch.equal(order.long(), torch.argsort(ids, stable=True))
    assert torch.equal(ends.long(), torch.bincount(ids, minlength=count).cumsum(0))


ROUTINGS = [
    Routing(128, 8), Routing(128, 8, renormalise=False), Routing(60, 4, rounded=True),
    Routing(8, 2), Routing(8, 1), Routing(4, 4),
    Routing(64, 6, renormalise=False, wide=True, scale=2.5),
    Routing(64, 6, rounded=True, scale=1.5), Routing(32, 4, Scoring.TOP_K_THEN_SOFTMAX),
]  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_routing_is_that_of_torch(routing: Routing, tokens: int) -> None:
    logits = normal(tokens, routing.num_experts, scale=3.0)
    choice, _ = TritonExperts(DEVICE).route(logits, routing)
    weights, ids = route(logits, routing)
    assert torch.equal(choice.ids.long(), ids)
    torch.testing.assert_close(choice.weights, weights.float(), atol=1e-6, rtol=1e-5)


def test_the_lowest_ids_win_among_equal_logits() -> None:
    logits = torch.zeros(2, 16, device=DEVICE)
    logits[1, 3::2] = 1.0
    logits[0, ::2] = -0.0
    choice, _ = TritonExperts(DEVICE).route(logits, Routing(16, 4))
    assert choice.ids.tolist() == [[0, 1, 2, 3], [3, 5, 7, 9]]
    assert torch.allclose(choice.weights, torch.full((2, 4), 0.25, device=DEVICE))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_logits_that_are_no_numbers_choose_valid_experts_with_weights_that_are_none() -> None:
    logits = torch.zeros(3, 10, device=DEVICE)
    logits[0], logits[1, 2] = float("nan"), float("nan")
    choice, _ = TritonExperts(DEVICE).route(logits, Routing(10, 4))
    assert bool(((choice.ids >= 0) & (choice.ids < 10)).all())
    assert choice.weights.isnan().tolist() == [[True] * 4, [True] * 4, [False] * 4]


def test_routing_normalises_the_residual_beside_its_choice() -> None:
    residual, weight = normal(3, 40), normal(40)
    _, normed = TritonExperts(DEVICE).route(normal(3, 8), Routing(8, 2), residual, weight, 1e-6)
    assert normed is not None
    wide = residual.double()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert close(normed, expected)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_token_s_program_multiplies_the_router_itself(routing: Routing, biased: bool) -> None:
    count, width, eps = routing.num_experts, 300, 1e-6
    residual, norm_weight, router = normal(9, width), normal(width), normal(count, width)
    bias = normal(count) if biased else None
    kernels = TritonExperts(DEVICE)
    assert kernels.multiplies(router)
    weighted = residual * norm_weight
    unscored = Unscored(weighted, (router, bias))
    choice, normed = kernels.route(unscored, routing, residual, norm_weight, eps)
    scale = torch.rsqrt(residual.double().pow(2).mean(-1, keepdim=True) + eps)
    logits = weighted.double() @ router.double().T * scale
    logits += 0 if bias is None else bias.double()
    weights, ids = route(logits.float(), routing)
    assert torch.equal(choice.ids.long(), ids)
    torch.testing.assert_close(choice.weights, weights.float(), atol=1e-4, rtol=1e-4)
    assert normed is not None
    assert close(normed, weighted.double() * scale)


def test_the_stream_behind_a_layer_has_its_sum_and_the_inputs_of_its_norm() -> None:
    parts, residual, weight = normal(10, 48), normal(5, 48), normal(48)
    out, weighted, squares = TritonExperts(DEVICE).combine_stream(parts, residual, weight)
    expected = residual.double() + parts.double().view(5, 2, 48).sum(1)
    assert close(out, expected)
    assert close(weighted, expected * weight.double())
    assert close(squares[0, :5], expected.pow(2).sum(-1))


@pytest.mark.parametrize("tokens", [0, 1, 2, 30])
def test_a_layer_is_that_of_plain_torch(tokens: int) -> None:
    experts = make(8, 2)
    x, logits = normal(tokens, HIDDEN), normal(tokens, 8)
    found = TritonExperts(DEVICE).apply(x, logits, experts)
    torch.testing.assert_close(
        found, TorchExperts().apply(x, logits, experts), atol=1e-5, rtol=1e-4
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_token_has_the_same_bits_among_any_others_in_the_batch_invariant_mode() -> None:
    device = torch.device("cuda")

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.1

    layer = Experts(
        Routing(16, 4, rounded=True), (made(16, 256), None), (made(16, 192, 256), None),
        (made(16, 256, 96), None),
    )  # fmt: skip
    kernels = TritonExperts(device, batch_invariant=True)
    x, logits = made(300, 256), made(300, 16)
    alone = torch.cat([kernels.apply(x[i : i + 1], logits[i : i + 1], layer) for i in range(300)])
    for first, end in ((0, 300), (7, 24), (100, 229)):
        assert torch.equal(kernels.apply(x[first:end], logits[first:end], layer), alone[first:end])
