"""Attention of long prompts by Kvant's own kernel, for cases that cuDNN does not compute.

Keys and values are decoded once, as for cuDNN, but sequences of any lengths share a launch. It takes
bidirectional attention, sinks, soft caps and head sizes of 256 as arguments. With a window, each sequence
has a separate launch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.long import together
from kvant.attention.triton.dense import dense_attention
from kvant.attention.triton.prefill import decoded
from kvant.attention.triton.tuning import dense_bytes, dense_shape
from kvant.kernels.triton.device import has_ptx, shared_memory_of_a_program
from kvant.kv.pool import LayerCache

AT_ONCE = 16384
"""Maximum number of keys that are decoded at once, unless they belong to one sequence."""


def serves(cache: LayerCache, q: Tensor, params: AttentionParams, *, causal: bool) -> bool:
    """Whether the kernel serves this layer on the device of q [T, num_q_heads, head_dim].

    Desktop Blackwell GPUs have bulk copies too, but less than half of the shared memory.
    """
    g = cache.spec.geometry
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and g.head_dim_k == g.head_dim_v
        and g.head_dim_k in (64, 128, 256)
        and params.scale > 0
        and has_ptx(q.device)
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and dense_bytes(g.head_dim_k, causal=causal) + 1024 <= shared_memory_of_a_program(q.device)
    )


def attend_dense(
    cache: LayerCache, q: Tensor, out: Tensor, step: Step, params: AttentionParams
) -> None:
    """Writes the rows of `step.long` in out [T, num_q_heads, head_dim]. q: [T, num_q_heads, head_dim]."""
    g = cache.spec.geometry
    window = params.window or 0
    shape = dense_shape(g.head_dim_k, causal=step.causal)
    if q.stride(-1) != 1:
        q = q.contiguous()
    for some in together(step.long, 0 if window else AT_ONCE):
        first = some[0]
        skipped = 0
        if window:
            seen_from = max(first.length - first.num_tokens - window + 1, 0)
            skipped = seen_from // shape.tile * shape.tile
        size = -(-(max(one.length for one in some) - skipped) // shape.tile) * shape.tile
        sides = []
        for side in (0, 1):
            rows = decoded(cache, side, step, first, size, q.dtype, len(some), skipped).flatten(
                0, 1
            )
            block = [shape.tile, 1, g.head_dim_k]
            sides.append(TensorDescriptor(rows, list(rows.shape), list(rows.stride()), block))
        most = max(one.num_tokens for one in some)
        dense_attention[(triton.cdiv(most, shape.rows), g.num_q_heads, len(some))](
            q, q.stride(0), q.stride(1), *sides, params.sinks, out,
            step.cu_seqlens_q, step.seqlens_kv, first.sequence, size, skipped,
            params.scale, params.softcap, window,
            GROUP=g.num_q_heads // g.num_kv_heads, HEADS=g.num_q_heads, HEAD=g.head_dim_k,
            ROWS=shape.rows, TILE=shape.tile, CAUSAL=step.causal, WINDOW=window > 0,
            SOFTCAP=params.softcap > 0, SINKS=params.sinks is not None,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
