"""Inputs for timing attention without an engine: pages in random order, random queries, one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.long import list_long
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.pool import KVPool, LayerCache
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, Scale, ScaleState, Source


@dataclass(frozen=True, slots=True)
class Case:
    """One timing: sequences of `lengths` stored tokens, `queries` of them new."""

    k: KVDtype
    v: KVDtype
    lengths: tuple[int, ...]
    queries: int = 1
    causal: bool = True
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    window: int | None = None


def kv_bytes(case: Case) -> int:
    """Bytes of K and V that must be read once."""
    row = case.k.format.row_bytes(case.head_dim) + case.v.format.row_bytes(case.head_dim)
    seen = sum(
        length if case.window is None else min(length, case.window + case.queries)
        for length in case.lengths
    )
    return seen * case.kv_heads * row


@dataclass(frozen=True, slots=True)
class Inputs:
    cache: LayerCache
    q: Tensor
    step: Step
    params: AttentionParams


def make_cache(
    case: Case, num_pages: int, device: torch.device, *, seed: int = 0, distinct: int = 2048
) -> LayerCache:
    """Builds `num_pages` pages of encoded normal numbers; after `distinct` pages their content repeats."""
    torch.manual_seed(seed)
    geometry = LayerGeometry(
        0, "bench", Attention.FULL, case.q_heads, case.kv_heads, case.head_dim, case.head_dim
    )
    choices = [
        Choice(dtype, Source.EXPLICIT, "bench", (), Scale(ScaleState.NONE))
        for dtype in (case.k, case.v)
    ]
    distinct = min(distinct, num_pages)
    spec = LayerSpec(geometry, choices[0], choices[1], "triton")
    plan = KVPlan(
        Role.TARGET, "bench", ComputeDtype.BFLOAT16, "bench", case.page_size, (spec,)
    )  # fmt: skip
    encoded: list[Tensor] = []
    scales: dict[tuple[int, Side], Tensor] = {}
    for side, dtype in ((Side.K, case.k), (Side.V, case.v)):
        scale = None
        if dtype.format.takes_outside_scale:
            scale = torch.full((1,), 0.01 if dtype is KVDtype.NVFP4 else 0.02, device=device)
        x = torch.randn(distinct * case.page_size, case.kv_heads, case.head_dim, device=device)
        x *= torch.rand(x.shape[:2], device=device)[..., None] + 0.5
        if scale is not None:
            scales[0, side] = scale
        encoded += codec_for(dtype).encode(x.to(torch.bfloat16), scale)
    cache = KVPool(plan, num_pages, device=device, scales=scales)[0]
    for plane, rows in zip((*cache.k, *cache.v), encoded, strict=True):
        pages = rows.view(distinct, *plane.shape[1:])
        for start in range(0, num_pages, distinct):
            plane[start : start + distinct] = pages[: num_pages - start]
    return cache


def paged_step(
    lengths: Sequence[int], queries: int, order: Tensor, page_size: int, *, causal: bool = True
) -> Step:
    """Builds a step of `queries` queries per sequence. Nothing is written.

    lengths: stored tokens per sequence, new ones included. order: [pages] int32, page ids, assigned in turn.
    """
    pages = [-(-length // page_size) for length in lengths]
    device, seqs, tokens = order.device, len(lengths), len(lengths) * queries
    table = torch.zeros(seqs, max(pages), dtype=torch.int32, device=device)
    start = 0
    for i, n in enumerate(pages):
        table[i, :n] = order[start : start + n]
        start += n
    return Step(
        cu_seqlens_q=torch.arange(seqs + 1, dtype=torch.int32, device=device) * queries,
        seqlens_kv=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=table,
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        positions=torch.zeros(tokens, dtype=torch.int64, device=device),
        max_seqlen_q=queries,
        max_seqlen_kv=max(lengths),
        causal=causal,
    )


def make_inputs(
    case: Case,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    cache: LayerCache | None = None,
    seed: int = 0,
) -> Inputs:
    """Builds random pages in random order and random queries; lists long sequences, as the engine does."""
    torch.manual_seed(seed)
    pages = [-(-length // case.page_size) for length in case.lengths]
    if cache is None:
        cache = make_cache(case, sum(pages), device, seed=seed)
    order = torch.randperm(sum(pages), device=device).to(torch.int32)
    step = paged_step(case.lengths, case.queries, order, case.page_size, causal=case.causal)
    seqs, tokens = len(pages), len(step.positions)
    step = list_long(step, np.full(seqs, case.queries), np.array(case.lengths))
    q = torch.randn(tokens, case.q_heads, case.head_dim, device=device, dtype=torch.float32)
    params = AttentionParams(scale=case.head_dim**-0.5, window=case.window)
    return Inputs(cache, q.to(dtype), step, params)
