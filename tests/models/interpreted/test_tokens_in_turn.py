"""Kernels that pass from token to token give the same bits however sequences are cut and batched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from kvant.kv.geometry import StateGeometry, StateKind
from kvant.kv.resolve_state import RECURRENT_FORMATS
from kvant.kv.spec import StateSpec
from kvant.kv.state_pool import StateCache
from kvant.models.recurrent.scan import scan
from tests.attention import driver
from tests.models.recurrent.test_scan import cache, packed

kernels = pytest.importorskip("kvant.models.recurrent.kernels")
stored = pytest.importorskip("kvant.models.recurrent.stored")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
LENGTHS = (6, 3)
WAYS = (
    ((6, 3),),
    ((3, 1), (1, 2), (2, 0)),
    ((1, 0), (1, 0), (4, 3)),
    tuple((1, int(i < 3)) for i in range(6)),
)
"""Ways to cut both sequences into steps: tokens of each of them in each step."""
HEADS, KEY_HEADS, VALUES, KEYS = 2, 1, 12, 16
FORMATS: tuple[KVDtype, ...] = RECURRENT_FORMATS
if DEVICE == "cpu":  # the interpreter takes seconds for each
    FORMATS = KVDtype.FLOAT32, KVDtype.INT8_PER_TOKEN_HEAD


def states(shape: tuple[int, ...], kind: StateKind, dtype: KVDtype) -> StateCache:
    """Pages of states, full of NaN where the format has it: a new sequence reads none of it."""
    spec = StateSpec(StateGeometry(kind, shape), driver.choice(dtype))
    found = codec_for(dtype).encode(torch.zeros(3, *shape), None)
    planes = tuple(plane.to(DEVICE) for plane in found)
    for plane in planes:
        if plane.dtype.is_floating_point:
            plane.fill_(torch.nan)
    return StateCache(spec, planes)


def steps(run: Any, inputs: tuple[Tensor, ...], way: Any) -> Tensor:
    """run(inputs, rows, starts, cu_seqlens) of every step. Returns the results of both sequences' tokens."""
    done, found = [0, 0], [[], []]  # type: ignore[var-annotated]
    offsets = (0, LENGTHS[0])
    for counts in way:
        some = [i for i in (1, 0) if counts[i]]  # in another order than before
        tokens = [offsets[i] + done[i] + j for i in some for j in range(counts[i])]
        ends = torch.tensor([0, *(counts[i] for i in some)]).cumsum(0)
        out = run(
            [x[tokens] for x in inputs],
            torch.tensor([i + 1 for i in some], device=DEVICE),
            torch.tensor([done[i] for i in some], dtype=torch.int32, device=DEVICE),
            ends.to(device=DEVICE, dtype=torch.int32),
        )
        for i, part in zip(some, out.split([counts[i] for i in some]), strict=True):
            found[i].append(part.cpu())
            done[i] += counts[i]
    assert tuple(done) == LENGTHS
    return torch.cat([*found[0], *found[1]])


def same_bits(make: Any, run: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, StateCache]:
    """make() -> states; run(states) -> what `steps` calls. The results and states of the first way."""
    first: tuple[Tensor, StateCache] | None = None
    for way in WAYS:
        held = make()
        found = steps(run(held), inputs, way)
        if first is None:
            first = found, held
            continue
        assert torch.equal(found, first[0])
        for plane, other in zip(held.planes, first[1].planes, strict=True):
            assert torch.equal(plane[1:].view(torch.uint8), other[1:].view(torch.uint8))
    assert first is not None
    return first


def defined(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> tuple[Tensor, Any]:
    made = cache((HEADS, VALUES, KEYS))
    there = packed([0, 0], list(LENGTHS), [1, 2])
    out = scan(*(x.cpu().double() for x in (q, k, v, g)), None if beta is None else beta.cpu().double(),
               made, replace(there, singly=True))  # fmt: skip
    return out, made.planes[0][1:3]


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_delta_rule(dtype: KVDtype) -> None:
    torch.manual_seed(0)
    total, width = sum(LENGTHS), KEY_HEADS * KEYS
    mixed = torch.randn(total, 2 * width + HEADS * VALUES, device=DEVICE)
    a, b = torch.randn(total, HEADS, device=DEVICE), torch.randn(total, HEADS, device=DEVICE)
    a_log, bias = torch.randn(HEADS, device=DEVICE), torch.randn(HEADS, device=DEVICE)

    def run(held: StateCache) -> Any:
        def step(some: list[Tensor], rows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
            found: Tensor = kernels.delta_step(
                *some, a_log, bias, stored.Stored.of(held), rows, starts, KEY_HEADS, strongest=1.0,
                cu_seqlens=ends,
            )  # fmt: skip
            return found

        return step

    shape = HEADS, VALUES, KEYS
    out, held = same_bits(lambda: states(shape, StateKind.RECURRENT, dtype), run, (mixed, a, b))
    if dtype is not KVDtype.FLOAT32:
        return  # rounded at every token; bits say enough
    q, k, v = mixed.split([width, width, HEADS * VALUES], 1)
    q, k = (x.view(total, KEY_HEADS, KEYS) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    g = -a_log.exp() * F.softplus(a + bias)
    expected, last = defined(q * KEYS**-0.5, k, v.view(total, HEADS, VALUES), g, b.sigmoid())
    torch.testing.assert_close(out.double(), expected.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(held.planes[0][1:].cpu(), last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", FORMATS)
def test_mamba2(dtype: KVDtype) -> None:
    torch.manual_seed(1)
    total, each = sum(LENGTHS), KEY_HEADS * KEYS
    mixed = torch.randn(total, HEADS * VALUES + 2 * each, device=DEVICE)
    dt = torch.randn(total, HEADS, device=DEVICE)
    a_log, bias, d = (torch.randn(HEADS, device=DEVICE) for _ in range(3))

    def run(held: StateCache) -> Any:
        def step(some: list[Tensor], rows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
            found: Tensor = kernels.mamba_step(
                *some, a_log, bias, d, stored.Stored.of(held), rows, starts, KEY_HEADS,
                (0.0, float("inf")), ends,
            )  # fmt: skip
            return found

        return step

    shape = HEADS, VALUES, KEYS
    out, held = same_bits(lambda: states(shape, StateKind.RECURRENT, dtype), run, (mixed, dt))
    if dtype is not KVDtype.FLOAT32:
        return
    x, k, q = mixed.split([HEADS * VALUES, each, each], 1)
    x = x.view(total, HEADS, VALUES)
    k, q = (part.view(total, KEY_HEADS, KEYS) for part in (k, q))
    step = F.softplus(dt + bias)
    expected, last = defined(q, k, x * step[..., None], -step * a_log.exp(), None)
    expected = expected + d.cpu().double()[:, None] * x.cpu().double()
    torch.testing.assert_close(out.double(), expected.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(held.planes[0][1:].cpu(), last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [KVDtype.FLOAT32, KVDtype.BFLOAT16])
def test_convolutions(dtype: KVDtype) -> None:
    """Also where a state rounds what it keeps."""
    torch.manual_seed(2)
    channels, size = 40, 4
    x = torch.randn(sum(LENGTHS), channels, device=DEVICE)
    weight, bias = torch.randn(channels, size, device=DEVICE), torch.randn(channels, device=DEVICE)

    def run(held: StateCache) -> Any:
        def step(some: list[Tensor], rows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
            counts = (ends[1:] - ends[:-1]).long()
            owners = torch.repeat_interleave(torch.arange(len(rows), device=DEVICE), counts)
            found: Tensor = kernels.conv_prompts(
                some[0], weight, bias, held.numbers, rows, starts, owners.to(torch.int32), ends,
                silu=True, stored=True,
            )  # fmt: skip
            return found

        return step

    same_bits(lambda: states((size - 1, channels), StateKind.CONV, dtype), run, (x,))
