"""Kernels of recurrent layers give what `scan` and `conv` define, and touch the rows of the step alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.kv.geometry import StateKind
from kvant.models.recurrent.conv import causal_conv
from kvant.models.recurrent.packed import Packed
from kvant.models.recurrent.scan import scan
from tests.models.recurrent.test_scan import ROWS, cache, packed

kernels = pytest.importorskip("kvant.models.recurrent.kernels")
chunk_kernels = pytest.importorskip("kvant.models.recurrent.delta_chunks")
layer_kernels = pytest.importorskip("kvant.models.recurrent.delta_layer")
stored = pytest.importorskip("kvant.models.recurrent.stored")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
PLACES = [3, 0, ROWS, 7, ROWS]  # twice the scratch row, as padding
STARTS = [5, 0, -1, 100, -1]


def where(dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    return torch.tensor(PLACES, device=DEVICE), torch.tensor(STARTS, dtype=dtype, device=DEVICE)


def before(*shape: int) -> Tensor:
    """States in rows: NaN where none may look."""
    state = torch.full((ROWS + 1, *shape), torch.nan, device=DEVICE)
    for row, start in zip(PLACES, STARTS, strict=True):
        if start > 0:
            state[row] = torch.randn(*shape, device=DEVICE)
    return state


def native(state: Tensor) -> Any:
    """States as kernels take them."""
    made = cache(tuple(state.shape[1:]))
    return stored.Stored.of(replace(made, planes=(state,)))


def defined(
    run: object, state: Tensor, kind: StateKind, lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """Outputs and states of a definition in float64 over the same rows."""
    made = cache(tuple(state.shape[1:]), kind)
    made.planes[0].copy_(state)
    out = run(made, packed([max(0, s) for s in STARTS], lengths, PLACES))  # type: ignore[operator]
    return out, made.planes[0]


def same(
    found: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    lengths: list[int],
    far: float = 1e-4,
) -> None:
    real = [i for i, row in enumerate(PLACES) if row != ROWS]
    tokens = [
        t
        for i, part in enumerate(torch.arange(sum(lengths)).split(lengths))
        if i in real
        for t in part.tolist()
    ]
    close = {"rtol": far, "atol": far, "equal_nan": True}
    torch.testing.assert_close(
        found[0].cpu().double()[tokens], expected[0].double()[tokens], **close
    )
    torch.testing.assert_close(found[1].cpu()[:ROWS], expected[1][:ROWS], **close)


@pytest.mark.parametrize("lengths", [[1] * 5, [1, 2, 1, 5, 3], [30, 2, 1, 20, 3]])
def test_convolutions(lengths: list[int]) -> None:
    torch.manual_seed(0)
    channels, size = 530, 4
    x = torch.randn(sum(lengths), channels + 6, device=DEVICE)[:, :channels]
    weight, bias = torch.randn(channels, size, device=DEVICE), torch.randn(channels, device=DEVICE)
    state, (rows, starts) = before(size - 1, channels), where()

    def define(made: object, there: object) -> Tensor:
        return causal_conv(x.cpu(), weight.cpu(), bias.cpu(), made, there, silu=True)  # type: ignore[arg-type]

    expected = defined(define, state, StateKind.CONV, lengths)
    if max(lengths) == 1:
        out = kernels.conv_step(x, weight, bias, state, rows, starts, silu=True)
    else:
        counts = torch.tensor(lengths, device=DEVICE)
        owners = torch.repeat_interleave(torch.arange(5, device=DEVICE), counts).to(torch.int32)
        ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
        out = kernels.conv_prompts(x, weight, bias, state, rows, starts, owners, ends, silu=True)
    same((out, state), expected, lengths)


@pytest.mark.parametrize(("values", "keys"), [(16, 32), (40, 24)])
def test_a_token_of_the_delta_rule(values: int, keys: int) -> None:
    torch.manual_seed(1)
    heads, key_heads, n = 4, 2, len(PLACES)
    mixed = torch.randn(n, 2 * key_heads * keys + heads * values, device=DEVICE)
    a, b = torch.randn(n, heads, device=DEVICE), torch.randn(n, 2 * heads, device=DEVICE)[:, :heads]
    a_log, bias = torch.randn(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    state, (rows, starts) = before(heads, values, keys), where()

    def define(made: object, there: object) -> Tensor:
        width = key_heads * keys
        q, k, v = mixed.cpu().double().split([width, width, heads * values], 1)
        q, k = (x.view(n, key_heads, keys) for x in (q, k))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        g = -a_log.cpu().double().exp() * F.softplus(a.cpu().double() + bias.cpu().double())
        v = v.view(n, heads, values)
        return scan(q * keys**-0.5, k, v, g, 2 * b.cpu().double().sigmoid(), made, there)  # type: ignore[arg-type]

    expected = defined(define, state, StateKind.RECURRENT, [1] * n)
    out = kernels.delta_step(
        mixed, a, b, a_log, bias, native(state), rows, starts, key_heads, strongest=2.0
    )
    same((out, state), expected, [1] * n)


def test_a_token_of_mamba2() -> None:
    torch.manual_seed(2)
    heads, groups, values, keys, n = 4, 2, 24, 16, len(PLACES)
    mixed = torch.randn(n, heads * values + 2 * groups * keys, device=DEVICE)
    dt, d = torch.randn(n, heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    a_log, bias = torch.randn(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    state, (rows, starts) = before(heads, values, keys), where()

    def define(made: object, there: object) -> Tensor:
        x, k, q = mixed.cpu().double().split([heads * values, groups * keys, groups * keys], 1)
        x, k, q = x.view(n, heads, values), k.view(n, groups, keys), q.view(n, groups, keys)
        step = F.softplus(dt.cpu().double() + bias.cpu().double()).clamp(0.5, torch.inf)
        g = -step * a_log.cpu().double().exp()
        out = scan(q, k, x * step[..., None], g, None, made, there)  # type: ignore[arg-type]
        return out + d.cpu().double()[:, None] * x

    expected = defined(define, state, StateKind.RECURRENT, [1] * n)
    limits = (0.5, float("inf"))
    out = kernels.mamba_step(mixed, dt, a_log, bias, d, native(state), rows, starts, groups, limits)
    same((out, state), expected, [1] * n)


@pytest.mark.parametrize("delta", [False, True])
def test_the_passage_over_chunks(delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvant.models.recurrent import scan as module

    torch.manual_seed(3)
    lengths, heads, key_heads, values, keys = [70, 2, 3, 130, 1], 2, 1, 24, 16
    total = sum(lengths)
    q, k = torch.randn(total, key_heads, keys), torch.randn(total, key_heads, keys)
    k = k / k.norm(dim=-1, keepdim=True)
    v, g = torch.randn(total, heads, values), -torch.rand(total, heads)
    beta = torch.rand(total, heads) if delta else None
    state = before(heads, values, keys)

    def define(made: object, there: object) -> Tensor:
        return scan(q, k, v, g, beta, made, there)  # type: ignore[arg-type]

    expected = defined(define, state.cpu(), StateKind.RECURRENT, lengths)
    monkeypatch.setattr(module, "takes_kernels", lambda x, cache: True)
    q, k, v, g = (x.to(DEVICE) for x in (q, k, v, g))
    beta = None if beta is None else beta.to(DEVICE)
    made = cache((heads, values, keys))
    made = replace(made, planes=(state,))
    step = packed([max(0, s) for s in STARTS], lengths, PLACES).step
    assert step.rows is not None
    there = replace(
        step, cu_seqlens_q=step.cu_seqlens_q.to(DEVICE), seqlens_kv=step.seqlens_kv.to(DEVICE),
        rows=step.rows.to(DEVICE),
    )  # fmt: skip
    same((define(made, Packed.of(there)), state), expected, lengths)


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("alike", [False, True])
def test_chunks_of_the_delta_rule(alike: bool, dtype: torch.dtype, far: float) -> None:
    """alike: tokens that repeat, whose triangular systems are as bad as they get."""
    torch.manual_seed(6)
    lengths, heads, key_heads, values, keys = [70, 2, 3, 1, 130], 4, 2, 24, 16
    total, width = sum(lengths), key_heads * keys
    mixed = torch.randn(total, 2 * width + heads * values, device=DEVICE)
    if alike:
        mixed = mixed[:1] + 0.01 * mixed
    mixed = mixed.to(dtype)
    a, b = (
        torch.randn(total, heads, device=DEVICE) - 4 * alike,
        torch.randn(total, 2 * heads, device=DEVICE),
    )
    b = b[:, :heads] + 4 * alike
    a_log, bias = torch.randn(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    state = before(heads, values, keys)

    def define(made: object, there: object) -> Tensor:
        q, k, v = mixed.cpu().double().split([width, width, heads * values], 1)
        q, k = (x.view(total, key_heads, keys) for x in (q, k))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        g = -a_log.cpu().double().exp() * F.softplus(a.cpu().double() + bias.cpu().double())
        v = v.view(total, heads, values)
        return scan(q * keys**-0.5, k, v, g, b.cpu().double().sigmoid(), made, there)  # type: ignore[arg-type]

    expected = defined(define, state.cpu(), StateKind.RECURRENT, lengths)
    step = packed([max(0, s) for s in STARTS], lengths, PLACES).step
    assert step.rows is not None
    there = Packed.of(
        replace(
            step, cu_seqlens_q=step.cu_seqlens_q.to(DEVICE), seqlens_kv=step.seqlens_kv.to(DEVICE),
            rows=step.rows.to(DEVICE),
        )
    )  # fmt: skip
    chunks = there.chunks(64)
    assert chunks is not None
    out = torch.full((total, heads, values), torch.nan, dtype=dtype, device=DEVICE)
    chunk_kernels.delta_chunks(
        mixed, a, b, a_log, bias, native(state), there, chunks, key_heads, out, strongest=1.0
    )
    is_left = out.isnan().all(-1).all(-1)
    assert is_left.nonzero().flatten().tolist() == [75], "a sequence of one token is not in a chunk"
    kernels.delta_step(
        mixed, a, b, a_log, bias, native(state), there.rows, there.starts, key_heads,
        strongest=1.0, singles=there.singles, out=out,
    )  # fmt: skip
    same((out, state), expected, lengths, far)


@pytest.mark.parametrize("processors", [1, 1000])
def test_chunks_of_values_of_any_size(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in 16 bits scale what they multiply: results are those of small values, to the bit."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(kernels, "shared_memory_of_a_program", lambda _: 1 << 18)
    torch.manual_seed(7)
    length, heads, keys, values = 70, 2, 16, 128
    mixed = torch.randn(length, 2 * keys + heads * values, device=DEVICE).to(torch.bfloat16)
    a, b = torch.randn(2, length, heads, device=DEVICE)
    a_log, bias = torch.randn(2, heads, device=DEVICE)
    step = packed([0], [length], [0]).step
    there = Packed.of(
        replace(
            step, cu_seqlens_q=step.cu_seqlens_q.to(DEVICE), seqlens_kv=step.seqlens_kv.to(DEVICE),
            rows=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        )
    )  # fmt: skip
    chunks = there.chunks(64)
    assert chunks is not None

    def run(factor: float) -> tuple[Tensor, Tensor]:
        scaled = mixed.clone()
        scaled[:, 2 * keys :] *= factor
        state, out = torch.zeros(1, heads, values, keys), torch.zeros(length, heads, values)
        state, out = state.to(DEVICE), out.to(DEVICE, torch.bfloat16)
        given = scaled, a, b, a_log, bias, native(state)
        chunk_kernels.delta_chunks(*given, there, chunks, 1, out, strongest=1.0)
        return out, state

    for factor in (2.0**60, 2.0**-60):
        for large, small in zip(run(factor), run(1.0), strict=True):
            assert torch.equal(large, small * factor)
    assert not any(found.any() for found in run(0.0))


def test_which_programs_pass_states_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, exact = (torch.empty(1, 1, 64, 128, dtype=d) for d in (torch.float16, torch.float32))
    monkeypatch.setattr(kernels, "multiprocessors", lambda _: 132)
    for room, few, many in (
        (232448, (32, 2), (128, 2)),
        (163840, (32, 2), (32, 2)),
        (101376, (32, 1), (32, 1)),
    ):
        monkeypatch.setattr(kernels, "shared_memory_of_a_program", lambda _, room=room: room)
        assert kernels._passage(32, 128, 128, narrow) == few
        assert kernels._passage(256, 128, 128, narrow) == many
        assert kernels._passage(256, 128, 128, exact) == (32, 1)
        assert kernels._passage(32, 16, 128, narrow)[0] == 16


@pytest.mark.parametrize("rows", [3, 1030])
def test_a_gated_norm(rows: int) -> None:
    torch.manual_seed(4)
    heads, width = 4, 24
    x, weight = torch.randn(rows * heads, width, device=DEVICE), torch.randn(width, device=DEVICE)
    gate = torch.randn(rows, heads * width + 8, device=DEVICE)[:, : heads * width]
    out = kernels.gated_norm(x, gate, weight, 1e-6)
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(out, normed * F.silu(gate.reshape(-1, width)), rtol=1e-5, atol=1e-5)


def test_a_gated_norm_has_one_tile_where_rows_must_be_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[int, int]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, ROWS, num_warps, **__: launched.append((ROWS, num_warps))

    monkeypatch.setattr(kernels, "_gated_norm", Kernel())
    for rows in (1, 4096):
        x = torch.empty(rows, 16, device=DEVICE)
        kernels.gated_norm(x, x, x[0], 1e-6, alike=True)
    assert len(launched) == 2
    assert launched[0] == launched[1], "the tile decides in which order a row's sum is added"


@pytest.mark.parametrize(("processors", "crowd"), [(1000, 15), (1, 1000), (1, 1)])
@pytest.mark.parametrize(("key_heads", "values", "keys"), [(1, 16, 32), (2, 40, 24), (2, 72, 24)])
def test_a_token_between_the_products(
    values: int,
    keys: int,
    key_heads: int,
    processors: int,
    crowd: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole head's state at a time, then tiles of 32 values, then tiles that are copied ahead."""
    monkeypatch.setattr(layer_kernels, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(layer_kernels, "_CROWD", crowd)
    torch.manual_seed(5)
    heads, n = 2 * key_heads, len(PLACES)
    width = key_heads * keys
    channels = 2 * width + heads * values
    joined = torch.randn(n, channels + heads * values + 2 * heads, device=DEVICE)
    qkv, z, b, a = joined.split([channels, heads * values, heads, heads], 1)
    weight, bias = torch.randn(channels, 4, device=DEVICE), torch.randn(channels, device=DEVICE)
    a_log, dt_bias = torch.randn(heads, device=DEVICE), torch.randn(heads, device=DEVICE)
    of_norm = torch.randn(values, device=DEVICE)
    conv, state = before(3, channels), before(heads, values, keys)
    apart = torch.zeros(ROWS + 1, 2, *state.shape[1:], device=DEVICE)[
        :, 1
    ]  # rows of another stride
    apart.copy_(state)
    rows, starts = where()
    mixed, moved = defined(
        lambda made, there: causal_conv(
            qkv.cpu().double(), weight.cpu(), bias.cpu(), made, there, silu=True
        ),
        conv, StateKind.CONV, [1] * n,
    )  # fmt: skip

    def define(made: object, there: object) -> Tensor:
        q, k, v = mixed.split([width, width, heads * values], 1)
        q, k = (x.view(n, key_heads, keys) for x in (q, k))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        g = -a_log.cpu().double().exp() * F.softplus(a.cpu().double() + dt_bias.cpu().double())
        out = scan(
            q * keys**-0.5, k, v.view(n, heads, values), g, b.cpu().double().sigmoid(), made, there
        )  # type: ignore[arg-type]
        out = out * torch.rsqrt((out * out).mean(-1, keepdim=True) + 1e-5) * of_norm.cpu().double()
        return out.flatten(1) * F.silu(z.cpu().double())

    expected = defined(define, state, StateKind.RECURRENT, [1] * n)
    out = layer_kernels.delta_layer(
        qkv, z, a, b, weight, bias, a_log, dt_bias, of_norm, 1e-5, conv, native(apart), rows, starts,
        key_heads, strongest=1.0,
    )  # fmt: skip
    same((out, apart), expected, [1] * n)
    same((out, conv), (expected[0], moved), [1] * n)


def test_tiles_of_states_are_copied_ahead_where_that_was_measured_to_be_faster() -> None:
    """Qwen3.5-9B on an H200: 128 sequences took 186 us a layer and 192 without; 32 took 105 and 92."""
    assert layer_kernels.is_crowd(128 * 16, 132)
    assert not layer_kernels.is_crowd(32 * 16, 132)
