"""Compares FlashInfer with Kvant's Triton backend on one GPU, over the same pages, in turns.

    python -m benchmarks.flashinfer --out DIRECTORY

Few queries are timed as replays of CUDA graphs, prompts by events around eager calls. FlashInfer's plan,
made on the host once per step, is timed separately. `difference` compares both results; it is not a bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flashinfer
import numpy as np
import torch
from torch import Tensor

from kvant.attention.triton.backend import TritonBackend
from kvant.kv.dtype import KVDtype
from kvant.measure.attention_inputs import Case, make_inputs
from kvant.measure.gpu_time import elapsed_us, time_us
from kvant.measure.read_bandwidth import read_bandwidth

PAGE = 16


@dataclass(frozen=True)
class Shape:
    kind: str  # of FlashInfer's wrapper
    stored: KVDtype
    lengths: tuple[int, ...]
    queries: int
    causal: bool = True
    window: int | None = None
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


BF16, FP8 = KVDtype.BFLOAT16, KVDtype.FP8_E4M3
SHAPES = {
    "decode bf16 B64 L8192": Shape("decode", BF16, (8192,) * 64, 1),
    "decode bf16 B1 L131072": Shape("decode", BF16, (131072,), 1),
    "decode bf16 B1 L1024": Shape("decode", BF16, (1024,), 1),
    "decode bf16 B256 L1024": Shape("decode", BF16, (1024,) * 256, 1),
    "decode bf16 B16 L4096": Shape("decode", BF16, (4096,) * 16, 1),
    "decode fp8 B64 L8192": Shape("decode", FP8, (8192,) * 64, 1),
    "16 queries bf16 B64 L8192": Shape("prefill", BF16, (8192,) * 64, 16),
    "16 queries bf16 B64 L8192 non-causal": Shape("prefill", BF16, (8192,) * 64, 16, causal=False),
    "prefill 4x8192": Shape("prefill", BF16, (8192,) * 4, 8192),
    "prefill 16x2048": Shape("prefill", BF16, (2048,) * 16, 2048),
    "prefill 2048 over 32768": Shape("prefill", BF16, (34816,), 2048),
    "prefill 4x8192 non-causal": Shape("prefill", BF16, (8192,) * 4, 8192, causal=False),
    "prefill 4x8192 window 4096": Shape("prefill", BF16, (8192,) * 4, 8192, window=4096),
    "prefill 4x8192 head 256": Shape(
        "prefill", BF16, (8192,) * 4, 8192, q_heads=16, head_dim=256
    ),
    "prefill 4x8192 head 64": Shape("prefill", BF16, (8192,) * 4, 8192, head_dim=64),
}  # fmt: skip


def wrapper(shape: Shape, table: Tensor, workspace: Tensor) -> tuple[Any, Callable[[], None]]:
    """Returns FlashInfer's wrapper, and a function that plans it for this shape."""
    pages = [-(-length // PAGE) for length in shape.lengths]
    indptr = torch.tensor([0, *np.cumsum(pages)], dtype=torch.int32)
    last = torch.tensor([(n - 1) % PAGE + 1 for n in shape.lengths], dtype=torch.int32)
    ids = torch.cat([table[i, :count] for i, count in enumerate(pages)])
    heads = (shape.q_heads, shape.kv_heads, shape.head_dim, PAGE)
    how = {
        "window_left": -1 if shape.window is None else shape.window - 1,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16 if shape.stored is BF16 else torch.float8_e4m3fn,
    }
    if shape.kind == "decode":
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        return decode, lambda: decode.plan(indptr, ids, last, *heads, **how)
    queries = torch.arange(len(pages) + 1, dtype=torch.int32) * shape.queries
    many = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    return many, lambda: many.plan(
        queries, indptr, ids, last, *heads, causal=shape.causal, **how
    )  # fmt: skip


def by_events(run: Callable[[], object], repeats: int = 7) -> list[float]:
    run()
    torch.cuda.synchronize()
    return [elapsed_us(run) for _ in range(repeats)]


def measure(name: str, shape: Shape, workspace: Tensor) -> dict[str, object]:
    device = workspace.device
    x = make_inputs(
        Case(shape.stored, shape.stored, shape.lengths, shape.queries, shape.causal,
             shape.q_heads, shape.kv_heads, shape.head_dim, PAGE, shape.window),
        device,
    )  # fmt: skip
    step, triton = x.step, TritonBackend()

    def times(run: Callable[[], object]) -> list[float]:
        if step.long:
            return by_events(run)
        return time_us(run, repeats=15, inner=4 if len(shape.lengths) >= 64 else 20)

    mine = triton.attend(x.cache, x.q, step, x.params)
    triton_us = times(lambda: triton.attend(x.cache, x.q, step, x.params))
    k, v = x.cache.k[0], x.cache.v[0]
    scales = {}
    if shape.stored is FP8:
        assert x.cache.k_scale is not None
        assert x.cache.v_scale is not None
        k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
        scales = {"k_scale": float(x.cache.k_scale), "v_scale": float(x.cache.v_scale)}
    theirs, plan = wrapper(shape, x.step.page_table, workspace)
    plan()
    out = torch.empty_like(mine)

    def run() -> object:
        return theirs.run(x.q, (k, v), out=out, **scales)

    run()
    difference = float((mine.double() - out.double()).norm() / mine.double().norm())
    flashinfer_us = times(run)
    plans = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        plan()
        torch.cuda.synchronize()
        plans.append((time.perf_counter() - begin) * 1e6)
    return {
        "case": name,
        "triton_us": triton_us,
        "difference": difference,
        "flashinfer_us": flashinfer_us,
        "backend": theirs._backend,
        "plan_us": statistics.median(plans),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda")
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    rows: list[dict[str, object]] = []
    bandwidth = read_bandwidth(device)
    for name, shape in SHAPES.items():
        rows.append(measure(name, shape, workspace))
        torch.cuda.empty_cache()
        print(name, *(f"{k} {v}" for k, v in rows[-1].items() if k != "case"), flush=True)
        found = {"read_tb_per_s": bandwidth, "rows": rows}
        (options.out / "h200-flashinfer.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
