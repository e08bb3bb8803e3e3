"""What warms an engine up launches every variant of products and rotations that a larger step launches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction

from kvant.attention.base import HeadRotation
from kvant.attention.triton import backend
from kvant.attention.triton.backend import TritonBackend
from kvant.execution.warm_up import _nowhere, step_lengths
from kvant.kv.dtype import KVDtype
from kvant.models.fused import triton_experts
from kvant.models.fused.experts import Experts
from kvant.models.fused.routing import Routing
from kvant.models.fused.triton_experts import TritonExperts
from kvant.weights import choose
from kvant.weights.codecs import TORCH_SCALE, NarrowStack, NarrowWeight, scale_shape
from kvant.weights.format import FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL, WeightFormat, int4_groups
from kvant.weights.linear import MOST_EXACT
from kvant.weights.rounding import Rounding
from kvant.weights.triton import product
from tests.attention.triton import case

MOST_TOKENS = 8448
LENGTHS = step_lengths(256, MOST_TOKENS, 4096)
NUMBERS = (
    *range(1, 80),
    *range(80, 1600, 37),
    *range(1600, MOST_TOKENS, 177),
    4096,
    8192,
    MOST_TOKENS,
)
"""Numbers of tokens of steps that engines run."""

Launches = set[tuple[object, ...]]


def _kind(value: object, name: str, unspecialised: Iterable[str], *, is_constant: bool) -> object:
    """Returns what a launch compiles an argument for."""
    if isinstance(value, Tensor):
        return value.dtype
    if is_constant or isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int if name in unspecialised else 1 if value == 1 else value % 16 == 0
    return type(value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Collects launches for an H200 in their place."""
    found: Launches = set()

    @functools.cache
    def signature(fn: Callable[..., object]) -> tuple[list[str], set[str]]:
        names = inspect.signature(fn).parameters
        return [*names], {n for n in names if "constexpr" in str(names[n].annotation)}

    def run(kernel: Any, *given: object, grid: object, warmup: bool, **named: object) -> None:
        names, constants = signature(kernel.fn)
        if isinstance(kernel, InterpretedFunction):
            unspecialised = kernel.kwargs.get("do_not_specialize") or ()
        else:
            unspecialised = [p.name for p in kernel.params if p.do_not_specialize]
        given_by = dict(zip(names, given, strict=False)) | named
        found.add((kernel.fn.__name__, *(
            (name, _kind(value, name, unspecialised, is_constant=name in constants or name not in names))
            for name, value in sorted(given_by.items())
        )))  # fmt: skip

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(GluonJITFunction, "run", run)
    for module in (backend, choose, product):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(product, "has_tile_copies", lambda device: True)
    for module in (product, choose, triton_experts, backend):
        monkeypatch.setattr(module, "has_ptx", lambda device: True)
    return found


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _weight(fmt: WeightFormat, rows: int, columns: int) -> NarrowWeight:
    codes = _empty(rows, columns * fmt.code.bits // 8, dtype=torch.uint8)
    scales = _empty(*scale_shape(fmt, rows, columns), dtype=TORCH_SCALE[fmt.scale])
    return NarrowWeight(fmt, rows, columns, codes, scales)


def _stack(fmt: WeightFormat, count: int, rows: int, columns: int) -> NarrowStack:
    return NarrowStack(_weight(fmt, count * rows, columns), count)


def _experts(fmt: WeightFormat | None, *, rounds: bool) -> Callable[[int], object]:
    """A layer of experts of Qwen3-30B-A3B."""
    made = TritonExperts(torch.device("cpu"))
    made._processors, made._shared_bytes, made._copies_tiles = 132, 232448, True
    up: Tensor | NarrowStack = _empty(128, 1536, 2048)
    down: Tensor | NarrowStack = _empty(128, 2048, 768)
    if fmt is not None:
        up, down = _stack(fmt, 128, 1536, 2048), _stack(fmt, 128, 2048, 768)
    router = _empty(128, 2048), None
    layer = Experts(Routing(128, 8, rounded=True), router, (up, None), (down, None), rounds=rounds)

    def run(tokens: int) -> None:
        # Up to 64 tokens, kernels in CUDA C++ multiply narrow weights.
        if fmt is None or tokens > 64:
            made.apply(_empty(tokens, 2048), _empty(tokens, 128), layer)

    return run


def _dense(fmt: WeightFormat, *, rounds: bool, rows: int = 2048) -> Callable[[int], object]:
    weight = _weight(fmt, rows, 4096)

    def run(tokens: int) -> None:
        x = _empty(tokens, 4096)
        if rounds and tokens > MOST_EXACT:
            made = choose.round_activations(x, Rounding(group=128))
            choose.multiply_rounded(made, weight, None)
        elif tokens > 64:
            choose.multiply(x, weight, None)

    return run


def _rotation() -> Callable[[int], object]:
    x = case.prepare(KVDtype.FP8_E4M3, heads=(32, 8), head_dims=(128, 128), sequences=((1, 1),))
    angles, norm = torch.zeros(99, 64, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    rotation = HeadRotation(angles, angles, True, norm, norm, 1e-6)
    step = _nowhere((1,), 16, torch.device("cpu"), 256)

    def run(tokens: int) -> None:
        some = replace(step, positions=step.positions.expand(tokens))
        TritonBackend().write_rotated(
            x.cache, torch.empty(tokens, 6144, dtype=torch.bfloat16), rotation, some
        )

    return run


CASES: dict[str, Callable[[], Callable[[int], object]]] = {
    "experts of 16 bits": lambda: _experts(None, rounds=False),
    "experts of 8 bits": lambda: _experts(FP8_BLOCK, rounds=False),
    "experts of 8 bits, activations too": lambda: _experts(FP8_BLOCK, rounds=True),
    "experts of 4 bits": lambda: _experts(int4_groups(128), rounds=False),
    "fp8 in blocks, activations too": lambda: _dense(FP8_BLOCK, rounds=True),
    "fp8 in blocks, a narrow output": lambda: _dense(FP8_BLOCK, rounds=True, rows=1024),
    "fp8 by channels": lambda: _dense(FP8_CHANNEL, rounds=False),
    "int8 by channels": lambda: _dense(INT8_CHANNEL, rounds=False),
    "int4 in groups": lambda: _dense(int4_groups(128), rounds=False),
    "rotation": _rotation,
}


@pytest.mark.parametrize("name", CASES)
def test_no_step_launches_a_product_that_was_not_warm(name: str, launches: Launches) -> None:
    run = CASES[name]()
    for lengths in LENGTHS:
        run(sum(lengths))
    warm = set(launches)
    assert warm
    for tokens in NUMBERS:
        run(tokens)
        assert launches <= warm, (tokens, launches - warm)
