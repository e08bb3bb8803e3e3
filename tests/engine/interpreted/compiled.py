"""Run as a program without `TRITON_INTERPRET`: compiles for an H200, on a machine without a GPU, what the
engine launches around the model, or with names of formats for K and V what attention launches over them,
and prints what it compiled. A third name is the format of wide rows; with a head size behind it, only steps
that read both forms are compiled, for queries in bfloat16 and in float32.

The interpreter knows no types: what it runs may still be refused by the compiler.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvant.attention.base import HeadRotation
from kvant.attention.triton import backend, both_decode, launch
from kvant.attention.triton.backend import TritonBackend
from kvant.execution.device_state import DeviceState
from kvant.execution.triton_step import most_likely, plain_step, write_pages
from kvant.kernels.triton.page_copy import copy_pages
from kvant.kernels.triton.zero import clear_listed, clear_pages
from kvant.kv.dtype import KVDtype
from kvant.kv.spec import WideRows
from kvant.sampling.triton_draw import draw_once
from tests.attention.driver import choice
from tests.attention.triton import case

H200 = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
_compiled: set[object] = set()


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if value is None:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def _compile(kernel: JITFunction[Any], *given: object, **options: Any) -> None:
    """In the place of a launch."""
    names = [parameter.name for parameter in kernel.params]
    arguments = dict(zip(names, given, strict=False))
    arguments |= {name: options.pop(name) for name in names if name in options}
    constant = {p.name for p in kernel.params if p.is_constexpr}
    constant |= {name for name, value in arguments.items() if value is None}
    types = {n: "constexpr" if n in constant else type_of(arguments[n]) for n in names}
    constants = {name: arguments[name] for name in constant}
    asked = {key: options[key] for key in ("num_warps", "num_stages", "maxnreg") if key in options}
    key = kernel.fn.__name__, *types.items(), *sorted(constants.items()), *asked.items()
    if key not in _compiled:
        _compiled.add(key)
        made = triton.compile(ASTSource(kernel, types, constants), target=H200, options=asked)
        assert made.asm["cubin"]
        print(kernel.fn.__name__, flush=True)


def _attention(k: KVDtype, v: KVDtype, wide: KVDtype | None = None) -> None:
    """Writing and reading rows, for one query and for many."""
    _for_h200()
    rows = None if wide is None else WideRows(choice(wide), choice(wide), 4, 128)
    if k is v and k.format.bits >= 8:
        for new in (1, 40):
            x = case.prepare(
                k, heads=(16, 1), head_dims=(576, 512), dtype=torch.bfloat16, latent=True,
                sequences=((99, new), (new, new)),
            )  # fmt: skip
            TritonBackend().write(x.cache, x.k, None, x.step)
            TritonBackend().attend(x.cache, x.q, x.step, x.params)
    for new, sinks in ((1, False), (1, True), (40, False)):
        x = case.prepare(
            k, v, head_dims=(128, 128), dtype=torch.bfloat16, sequences=((99, new), (new, new)),
            wide=rows, sinks=sinks,
        )  # fmt: skip
        if k.format.takes_rounding:
            x = replace(x, cache=replace(x.cache, k_rounding=case.rounding(x.k.shape[1], 128)))
        TritonBackend().write(x.cache, x.k, x.v, x.step)
        TritonBackend().attend(x.cache, x.q, x.step, x.params)
        with_sinks = replace(x.params, sinks=torch.zeros(x.q.shape[1], dtype=torch.bfloat16))
        TritonBackend().attend(x.cache, x.q, x.step, with_sinks)
        if rows is None:
            TritonBackend().attend(x.cache, x.q, x.step, replace(x.params, window=64))
        if rows is not None:
            TritonBackend(batch_invariant=True).attend(x.cache, x.q, x.step, x.params)
    if wide is None and k is KVDtype.BFLOAT16:
        # Two programs per multiprocessor, which mask every tile.
        many = case.prepare(
            k, v, heads=(8, 8), head_dims=(128, 128), dtype=torch.bfloat16, sequences=((9, 1),) * 30
        )
        TritonBackend().attend(many.cache, many.q, many.step, many.params)
    angles = torch.zeros(99, 64, dtype=torch.bfloat16)
    norm = torch.ones(128, dtype=torch.bfloat16)
    qkv = torch.cat([part.flatten(1) for part in (x.q, x.k, x.v)], 1)
    rotation = HeadRotation(angles, angles, True, norm, norm, 1e-6)
    for tile in ((4, 1), (16, 4)):  # of few rows and of many
        backend._rotated_at_once = lambda rows, device, tile=tile: tile  # type: ignore[misc]
        TritonBackend().write_rotated(x.cache, qkv, rotation, x.step)


def _both_forms(k: KVDtype, v: KVDtype, wide: KVDtype, head: int) -> None:
    """Decode steps over rows in two forms, which are read in one launch."""
    _for_h200()
    rows = WideRows(choice(wide), choice(wide), 4, 128)
    for dtype in (torch.bfloat16, torch.float32):
        x = case.prepare(
            k, v, head_dims=(head, head), dtype=dtype, sequences=((99, 1), (300, 1)), wide=rows
        )
        TritonBackend().attend(x.cache, x.q, x.step, x.params)


def _for_h200() -> None:
    modules: tuple[Any, ...] = (backend, both_decode)
    for module in modules:
        module.has_ptx = module.is_nvidia = lambda device: True
        module.multiprocessors = lambda device: 132
    launch.launches_ahead = lambda device: True  # type: ignore[assignment]


def _engine() -> None:
    state = DeviceState(3, 4, torch.device("cpu"))
    for dtype in (torch.float32, torch.float64):
        logits = torch.zeros(3, 9000, dtype=dtype)
        draw_once(logits)
        tokens = torch.zeros(3, dtype=torch.int64)
        most_likely(logits, tokens, tokens, tokens, state)
        most_likely(logits, tokens, tokens, tokens, state, kept=logits)
    wide = torch.zeros(3, 9000)
    most_likely(wide.to(torch.bfloat16), tokens, tokens, tokens, state, wide, tokens)
    write_pages(state, tokens, tokens)
    table = torch.zeros(3, 4, dtype=torch.int32)
    plain_step(tokens, tokens, tokens, tokens, tokens, state, table[None], 16, 64)
    clear_pages[(1,)](tokens, tokens, BLOCK=1024, num_warps=4)
    clear_listed[(1,)](tokens, tokens, GROUP=1 << 32, BLOCK=1024, num_warps=4)
    for to_rows in (True, False):
        copy_pages[(1,)](tokens, tokens, tokens, 64, TO_ROWS=to_rows, BLOCK=2048, num_warps=8)


if __name__ == "__main__":
    JITFunction.run = _compile  # type: ignore[method-assign,assignment]
    formats = [KVDtype[name] for name in sys.argv[1:4]]
    if sys.argv[4:]:
        _both_forms(*formats, int(sys.argv[4]))
    elif formats:
        _attention(*formats)
    else:
        _engine()
