"""Launches `fp8_prompts.cu`: attention of long runs of queries with fp8 tensor cores, on Hopper.

The tensor cores multiply codes of fp8 pages as they are stored. Queries and probabilities are rounded to the
four significant bits of e4m3. The result differs from attention over decoded numbers, so users must ask for
this kernel by name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, LongQuery, Step
from kvant.attention.launching import address, outer, plane_addresses
from kvant.attention.long import together
from kvant.kernels.cuda import build
from kvant.kernels.cuda.build import FLOAT, INT, LONG, POINTER, Kernel
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Encoding, ScalePlace
from kvant.kv.pool import LayerCache

TILE = 128
GROUPS = 3
"""Warpgroups of a program."""
ROWS = 64 * GROUPS
THREADS = 128 * GROUPS
STAGES = 5
"""Number of tiles in shared memory."""
MOST_SKIPPED = 24
"""Most tiles of a sequence with which warpgroups skip tiles that none of their rows sees. Skipping takes
registers: prompts of 1,024 tokens take 7 to 10 % less time, prompts of 8,192 up to 3 % more (one H200)."""
AT_ONCE = 32768
"""Maximum number of keys that one launch lays out, unless they belong to one sequence."""

SOURCES = ("hopper.cuh", "fp8_prompts.cu")

_LAY_OUT = (POINTER, POINTER, POINTER, POINTER, POINTER, LONG, POINTER, INT, INT, LONG, POINTER)
_ATTEND = (
    POINTER, LONG, LONG, POINTER, POINTER, INT, POINTER, INT, POINTER,
    POINTER, POINTER, INT, INT, INT, FLOAT, INT,
)  # fmt: skip


def stage_bytes(k: KVDtype, v: KVDtype, head: int) -> int:
    """Returns the bytes of a tile of keys and values, in memory and in shared memory."""
    a, b = (side.format.scale_place is ScalePlace.PLANE for side in (k, v))
    used = TILE * 128 + head * TILE + 4 * TILE * (a + b) + (16 if b else 0)
    return -(-used // 1024) * 1024


@functools.cache
def _kernels(
    k: KVDtype, v: KVDtype, head: int, heads: int, group: int, page_size: int, dtype: torch.dtype
) -> tuple[Kernel, Kernel, Kernel]:
    """Returns the kernel that lays codes out in tiles, and two that multiply them: without skips and with."""
    a, b = k.format, v.format
    defines = {
        "HEAD": head, "HEADS": heads, "GROUP": group, "PAGE": page_size, "STAGES": STAGES, "GROUPS": GROUPS,
        "SCALED_K": int(a.scale_place is ScalePlace.PLANE),
        "SCALED_V": int(b.scale_place is ScalePlace.PLANE),
        "E5M2_K": int(a.encoding is Encoding.E5M2), "E5M2_V": int(b.encoding is Encoding.E5M2),
        "BFLOAT16": int(dtype is torch.bfloat16),
    }  # fmt: skip
    make = functools.partial(build.build, __package__, SOURCES)
    shared = 1024 + ROWS * 128 + STAGES * stage_bytes(k, v, head)
    whole, skipping = ({**defines, "SKIPS": skips} for skips in (0, 1))
    for variant in (whole, skipping):  # at the same time, and each once
        build.begin(__package__, SOURCES, variant)
    return (
        make("lay_out", whole, 0, _LAY_OUT),
        make("fp8_prompts", whole, shared, _ATTEND),
        make("fp8_prompts", skipping, shared, _ATTEND),
    )


def attend_long(
    cache: LayerCache, q: Tensor, out: Tensor, step: Step, params: AttentionParams
) -> None:
    """Attends to the queries of `step.long`; other rows of `out` keep their values.

    q, out: [T, num_q_heads, head_dim], float16 or bfloat16, on the device of the pages.
    """
    if q.data_ptr() % 8 or q.stride(0) % 4 or q.stride(1) % 4 or q.stride(2) != 1:
        q = q.contiguous()  # rows are read 8 bytes at a time
    for some in together(step.long, AT_ONCE):
        _attend(cache, q, out, step, params, some)


def _attend(
    cache: LayerCache,
    q: Tensor,
    out: Tensor,
    step: Step,
    params: AttentionParams,
    some: Sequence[LongQuery],
) -> None:
    spec = cache.spec
    g = spec.geometry
    assert spec.k is not None
    assert spec.v is not None
    k, v, heads = spec.k.dtype, spec.v.dtype, g.num_kv_heads
    lay_out, whole, skipping = _kernels(
        k, v, g.head_dim_k, heads, g.num_q_heads // heads, cache.page_size, q.dtype
    )
    tiles = -(-max(one.length for one in some) // TILE)
    blocks = -(-max(one.num_tokens for one in some) // ROWS)
    first = some[0].sequence
    size = len(some) * heads * tiles * stage_bytes(k, v, g.head_dim_k)
    laid_out = torch.empty(size, dtype=torch.uint8, device=q.device)
    lay_out.launch(
        len(some) * heads * tiles,
        256,
        (
            *plane_addresses(cache.k), *plane_addresses(cache.v),
            step.page_table.data_ptr(), step.page_table.stride(0), step.seqlens_kv.data_ptr(),
            first, tiles, cache.page_stride, laid_out.data_ptr(),
        ),
    )  # fmt: skip
    attend = skipping if tiles <= MOST_SKIPPED else whole
    attend.launch(
        len(some) * g.num_q_heads * blocks,
        THREADS,
        (
            q.data_ptr(), q.stride(0), q.stride(1), laid_out.data_ptr(),
            address(cache.k_scale), outer(cache.k_scale),
            address(cache.v_scale), outer(cache.v_scale), out.data_ptr(),
            step.cu_seqlens_q.data_ptr(), step.seqlens_kv.data_ptr(), first, blocks, tiles,
            params.scale, int(step.causal),
        ),
    )  # fmt: skip
