"""Decode attention of other projects over Kvant's pages: FlashInfer, and FlashAttention-3 from vLLM.

Neither is a dependency. A peer reads 16-bit pages, or fp8 pages with one scale, and no other
format. Its times exclude its work on the host before a step (its plan).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvant.errors import NotServable, WayOut
from kvant.kv.dtype import KVDtype
from kvant.measure.attention_grid import Peer, Run
from kvant.measure.attention_inputs import Inputs

_READS = frozenset({KVDtype.BFLOAT16, KVDtype.FP8_E4M3})
_WORKSPACE = 512 << 20


def flashinfer_peer(device: torch.device) -> Peer:
    """FlashInfer's decode wrapper with tensor cores, which is its faster one for groups of query heads."""
    if importlib.util.find_spec("flashinfer") is None:
        raise NotServable(
            "flashinfer is asked for as a peer",
            why="it is not installed here",
            ways_out=[WayOut("install it", ("pip", "install", "flashinfer-python"))],
        )
    flashinfer: Any = importlib.import_module("flashinfer")
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)

    def prepare(x: Inputs) -> Run:
        g, page = x.cache.spec.geometry, x.cache.page_size
        lengths = x.step.seqlens_kv.cpu()
        pages = (lengths + page - 1) // page
        starts = torch.zeros(len(pages) + 1, dtype=torch.int32)
        starts[1:] = pages.cumsum(0)
        table = x.step.page_table
        ids = torch.cat([table[i, : int(count)] for i, count in enumerate(pages)])
        planes = _planes(x)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        wrapper.plan(
            starts, ids, (lengths - 1) % page + 1, g.num_q_heads, g.num_kv_heads, g.head_dim_k, page,
            q_data_type=x.q.dtype, kv_data_type=planes[0].dtype, sm_scale=x.params.scale,
        )  # fmt: skip
        out = torch.empty_like(x.q)
        scales = {}
        if x.cache.k_scale is not None and x.cache.v_scale is not None:
            scales = {"k_scale": float(x.cache.k_scale), "v_scale": float(x.cache.v_scale)}
        return lambda: wrapper.run(x.q, planes, out=out, **scales)

    return Peer("flashinfer", _READS, prepare)


def flash_attention_3_peer(library: Path | None) -> Peer:
    """Loads FlashAttention-3. library: `_vllm_fa3_C*.so`; None for that of the installed vLLM.

    fp8 keys need fp8 queries, which are rounded before the clock starts. The split of the work is
    computed once per step, as vLLM does it.
    """
    torch.ops.load_library(str(library or _installed_library()))  # type: ignore[no-untyped-call]
    ops = torch.ops._vllm_fa3_C

    def prepare(x: Inputs) -> Run:
        g, page = x.cache.spec.geometry, x.cache.page_size
        k, v = _planes(x)
        lengths, starts = x.step.seqlens_kv, x.step.cu_seqlens_q
        q, q_scale, k_scale, v_scale = x.q, None, None, None
        if x.cache.k_scale is not None and x.cache.v_scale is not None:
            shape = (lengths.shape[0], g.num_kv_heads)
            q = x.q.to(torch.float8_e4m3fn)
            q_scale = torch.ones(shape, device=q.device)
            k_scale, v_scale = x.cache.k_scale.expand(shape), x.cache.v_scale.expand(shape)
        most = x.step.max_seqlen_kv
        plan = ops.get_scheduler_metadata(
            lengths.shape[0], 1, most, g.num_q_heads, g.num_kv_heads, g.head_dim_k, g.head_dim_v,
            q.dtype, lengths, starts, None, None, None, None, page, 0, True, -1, -1, False, 0, None,
            0,
        )  # fmt: skip
        out = torch.empty_like(x.q)
        return lambda: ops.fwd(
            q, k, v, None, None, None, out, starts, None, None, None, lengths, 1, most,
            x.step.page_table, None, None, None, None, None, q_scale, k_scale, v_scale,
            x.params.scale, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip

    return Peer("flash-attention-3", _READS, prepare)


def _planes(x: Inputs) -> tuple[Tensor, Tensor]:
    k, v = x.cache.k[0], x.cache.v[0]
    assert x.cache.spec.k is not None
    if x.cache.spec.k.dtype is KVDtype.FP8_E4M3:
        return k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
    return k, v


def _installed_library() -> Path:
    spec = importlib.util.find_spec("vllm")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    for place in places:
        for found in sorted(Path(place).glob("vllm_flash_attn/_vllm_fa3_C*.so")):
            return found
    raise NotServable(
        "flash-attention-3 is asked for as a peer",
        why="its library is part of vLLM, which is not installed here",
        ways_out=[WayOut("say where the file is", ("--fa3-library", "_vllm_fa3_C.abi3.so"))],
    )
