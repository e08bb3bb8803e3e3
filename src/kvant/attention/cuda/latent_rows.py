"""Launches `latent_rows.cu`: attention to latents (MLA) that are stored in 8 bits, on Hopper.

With few heads, Triton's kernel waits for loads: it copies a tile only after the previous one is
multiplied, and every warp reads all queries again. Here each warp keeps a quarter of the queries' columns.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.launching import Shape, address, plane_addresses
from kvant.kernels.cuda import build
from kvant.kernels.cuda.build import FLOAT, INT, LONG, POINTER, Kernel
from kvant.kv.dtype import KVDtype
from kvant.kv.format import ScalePlace
from kvant.kv.pool import LayerCache

LATENT, WIDTH = 512, 576
"""Numbers of a latent, and of a stored row: the latent and its rotary part."""
SHAPE = Shape(rows=16, tile=64, warps=4, stages=2, programs=2)
"""The launch's tile sizes; stages: tiles in shared memory."""
SERVED = frozenset(
    {
        KVDtype.FP8_E4M3,
        KVDtype.FP8_E5M2,
        KVDtype.FP8_PER_TOKEN_HEAD,
        KVDtype.INT8_PER_TOKEN_HEAD,
    }
)
"""Formats that the kernel reads."""

_ARGUMENTS = (
    POINTER, LONG, LONG, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER,
    POINTER, POINTER, POINTER, LONG, INT, FLOAT, INT, INT, INT,
)  # fmt: skip


def serves(cache: LayerCache, dtype: torch.dtype) -> bool:
    """Whether this kernel serves the layer of latents on this device. dtype: of the queries."""
    g = cache.spec.geometry
    assert cache.spec.k is not None
    return (
        (g.head_dim_k, g.head_dim_v) == (WIDTH, LATENT)
        and dtype in (torch.float16, torch.bfloat16)
        and cache.spec.k.dtype in SERVED
        and build.available("latents in 8 bits are read by the general kernel")
    )


def sources(dtype: KVDtype) -> tuple[str, ...]:
    """Returns the kernel's source files, in the order in which they are concatenated."""
    format = f"formats/{dtype.format.codec}.cuh"
    return ("hopper.cuh", "latent_rows.cuh", format, "items.cuh", "latent_rows.cu")


def shared_bytes(shape: Shape) -> int:
    """Returns a program's bytes of dynamic shared memory: tiles, their scales, scores, probabilities."""
    padded = shape.tile + 8
    tiles = shape.stages * shape.tile * (WIDTH + 16 + 4)
    return tiles + shape.warps * shape.rows * padded * 4 + shape.rows * padded * 2


@functools.cache
def _kernel(
    dtype: KVDtype, group: int, page_size: int, compute: torch.dtype, shape: Shape
) -> Kernel:
    shared = shared_bytes(shape)
    defines: dict[str, int | str] = {
        "FORMAT_K": dtype.format.name, "SCALED_K": int(dtype.format.scale_place is ScalePlace.PLANE),
        "GROUP": group, "PAGE": page_size, "TILE": shape.tile, "STAGES": shape.stages,
        "PROGRAMS": shape.programs, "THREADS": 32 * shape.warps, "SHARED_BYTES": shared,
        "BFLOAT16": int(compute is torch.bfloat16),
    }  # fmt: skip
    return build.build(__package__, sources(dtype), "latent_rows", defines, shared, _ARGUMENTS)


def launch(
    cache: LayerCache,
    q: Tensor,
    step: Step,
    params: AttentionParams,
    out: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    shape: Shape,
    *,
    items: int,
    target: int,
    least: int,
) -> None:
    """Attends to q [T, num_q_heads, WIDTH]; writes `out`, or partial results of items.

    out: [T, num_q_heads, LATENT]. partial, partial_lse, items, target, least: as in `latent_attention`.
    """
    assert cache.spec.k is not None
    if q.data_ptr() % 8 or q.stride(0) % 4 or q.stride(1) % 4 or q.stride(2) != 1:
        q = q.contiguous()  # rows are read 8 bytes at a time
    kernel = _kernel(cache.spec.k.dtype, q.shape[1], cache.page_size, q.dtype, shape)
    kernel.launch(
        items,
        32 * shape.warps,
        (
            q.data_ptr(), q.stride(0), q.stride(1), *plane_addresses(cache.k), address(cache.k_scale),
            out.data_ptr(), partial.data_ptr(), partial_lse.data_ptr(),
            step.cu_seqlens_q.data_ptr(), step.seqlens_kv.data_ptr(),
            step.page_table.data_ptr(), step.page_table.stride(0), step.seqlens_kv.shape[0],
            params.scale, target, least, cache.page_stride,
        ),
        ahead=True,
    )  # fmt: skip
