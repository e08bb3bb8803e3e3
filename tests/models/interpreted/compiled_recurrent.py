"""Run as a program without `TRITON_INTERPRET`: compiles the kernels of recurrent layers for an H200, with the
widths of Qwen3.5-9B and Bamba in bfloat16, on a machine without a GPU, and prints what it compiled.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.runtime.jit import JITFunction

from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from kvant.kv.geometry import StateGeometry, StateKind
from kvant.kv.resolve_state import RECURRENT_FORMATS
from kvant.kv.spec import StateSpec
from kvant.kv.state_pool import StateCache
from kvant.models.recurrent import delta_chunks, delta_layer, kernels, mamba_layer, stored
from kvant.models.recurrent.packed import Chunks
from tests.attention import driver
from tests.models.interpreted.compiled import MOST_SHARED
from tests.models.interpreted.compiled import _compile as compile_only
from tests.models.recurrent.test_scan import packed

BF16 = torch.bfloat16


def states(shape: tuple[int, ...], dtype: KVDtype) -> stored.Stored:
    """One page of states."""
    spec = StateSpec(StateGeometry(StateKind.RECURRENT, shape), driver.choice(dtype))
    planes = codec_for(dtype).encode(torch.zeros(1, *shape), None)
    return stored.Stored.of(StateCache(spec, planes))


def main() -> None:
    n, rows = 3, torch.zeros(3, dtype=torch.int64)
    starts, ends = torch.zeros(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    for dtype in RECURRENT_FORMATS:
        channels, heads, keys, values = 8192, 32, 128, 128
        x, weight = torch.zeros(n, channels, dtype=BF16), torch.zeros(channels, 4, dtype=BF16)
        bias, per_head = torch.zeros(channels, dtype=BF16), torch.zeros(heads, dtype=BF16)
        a = torch.zeros(n, heads, dtype=BF16)
        last = torch.zeros(1, 3, channels, dtype=BF16)
        for some in (bias, None):
            kernels.conv_step(x, weight, some, last, rows, starts, silu=True)
        for is_stored in (False, True):
            kernels.conv_prompts(
                x, weight, None, last, rows, starts, starts, ends, silu=True, stored=is_stored
            )
        state = states((heads, values, keys), dtype)
        kernels.gated_norm(x.view(-1, values), torch.zeros(n, 8192, dtype=BF16), per_head, 1e-6)
        z, of_head = torch.zeros(n, 4096, dtype=BF16), torch.zeros(values, dtype=BF16)
        for count, some in ((n, bias), (40, None), (200, None)):  # few, more and many sequences
            wide = torch.zeros(count, channels, dtype=BF16)
            delta_layer.delta_layer(
                wide, z, a, a, weight, some, per_head, per_head, of_head, 1e-6, last, state, rows, starts,
                16, strongest=1.0,
            )  # fmt: skip
        if dtype not in (KVDtype.FLOAT32, KVDtype.INT8_PER_TOKEN_HEAD):
            continue  # one of each kind is enough: compiling takes long
        of_step = x, a, a, per_head, per_head, state, rows, starts, 16
        kernels.delta_step(*of_step, strongest=1.0)
        kernels.delta_step(*of_step, strongest=1.0, cu_seqlens=ends)
        bamba = states((128, 64, 256), dtype)
        wide = torch.zeros(n, 128 * 64 + 2 * 256, dtype=BF16)
        limits = (0.0, float("inf"))
        of_bamba = a, per_head, per_head, per_head, bamba, rows, starts, 1, limits
        kernels.mamba_step(wide, *of_bamba)
        kernels.mamba_step(wide, *of_bamba, ends)
        taps, kept = torch.zeros(8704, 4, dtype=BF16), torch.zeros(1, 3, 8704, dtype=BF16)
        for group in (8192, 1024):
            finish = mamba_layer.Finish(bias, group, 1e-6, gate_first=True, rounded=True)
            mamba_layer.mamba_layer(
                x, wide, a, taps, taps[:, 0], *of_bamba[1:4], kept, *of_bamba[4:], finish
            )
            mamba_layer.mamba_finish(x, wide, finish)
        kernels.short_conv(wide[:, :6144], taps[:2048, 1:], None, kept, rows, starts)
        for count in (n, 40, 200):
            row, low = torch.zeros(count, 12288, dtype=BF16), torch.zeros(count, 4096, dtype=BF16)
            delta_layer.delta_layer(
                row, low, low, low[:, :32], torch.zeros(12288, 4, dtype=BF16), None, per_head, bias, of_head,
                1e-6, torch.zeros(1, 3, 12288, dtype=BF16), state, rows, starts, 32,
                strongest=1.0, by_key=True,
            )  # fmt: skip
        of_chunks = torch.zeros(2, heads, 64, 128)
        scores, whole = torch.zeros(2, heads, 64, 64), torch.zeros(2, heads)
        some = torch.zeros(2, 2 * n, dtype=torch.int64)
        chunks = Chunks(64, [], some, some, some, [], [], some[:, :n], some[:, :2])
        out = torch.zeros(n, heads, values, dtype=BF16)
        for moved in (of_chunks, None):
            kernels.over_chunks(
                of_chunks,
                of_chunks,
                of_chunks,
                moved,
                scores,
                whole,
                state,
                rows,
                starts,
                chunks,
                out,
            )
        there = replace(packed([0] * n, [2] * n, [0] * n), rows=rows)
        for places in ([0], [0] * 5):  # few and many sequences
            delta_chunks.delta_chunks(
                x, a, a, per_head, per_head, state, there, replace(chunks, places=places), 16, out,
                strongest=1.0,
            )  # fmt: skip


if __name__ == "__main__":
    delta_layer.launches_ahead = lambda _: True  # type: ignore[assignment]
    delta_layer.multiprocessors = kernels.multiprocessors = lambda _: 132
    kernels.shared_memory_of_a_program = lambda _: MOST_SHARED
    delta_chunks.is_nvidia = lambda _: True
    stored.has_ptx = lambda _: True  # type: ignore[assignment]
    JITFunction.run = compile_only  # type: ignore[method-assign,assignment]
    main()
