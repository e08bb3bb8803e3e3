"""Launches `many_rows.cu`: verification of drafts, and other steps of many queries, on Hopper.

Rows (query, head of the group) fill a matrix product there, and reading a quantised cache at the
speed of its bytes needs keys and values as register operands of `wgmma`, which Triton does not make.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.triton.codec import READING, Kind, Reading, Scaling
from kvant.attention.triton.cut import Shape
from kvant.attention.triton.launch import outer, words
from kvant.kernels.cuda import build
from kvant.kernels.cuda.build import FLOAT, INT, LONG, POINTER, Kernel
from kvant.kv.dtype import KVDtype
from kvant.kv.pool import LayerCache

logger = logging.getLogger(__name__)

HEAD = 128
ROWS = 64
TILE = 64
WARPS = 8
PROGRAMS = 2
"""Of a multiprocessor: four warpgroups of 128 registers a thread."""
FEWEST = 33
"""Rows from which this kernel is the faster one."""

SOURCES = ("hopper.cuh", "codes.cuh", "items.cuh", "many_rows.cu")

_KINDS = frozenset({Kind.E4M3, Kind.E5M2, Kind.INT8, Kind.UINT4, Kind.E2M1})
_SCALINGS = frozenset({Scaling.NONE, Scaling.ROW, Scaling.ROW_ZERO, Scaling.BLOCK})
_SINKS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_SHARED = 227 * 1024 // PROGRAMS - 5 * 1024
"""Bytes a program may ask for, so that all programs of a multiprocessor fit beside what is static."""
_FIXED = 1024 + ROWS * HEAD * 2 + 2 * TILE * ROWS * 2  # to align, queries, probabilities twice
_TURNED = 1024 + ROWS * HEAD * 2 + ROWS * (HEAD + 4) * 4  # queries, the output being turned
_ARGUMENTS = (
    POINTER, LONG, LONG, POINTER, POINTER, POINTER, POINTER, POINTER, INT, POINTER, INT, POINTER, INT,
    POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, LONG, INT, FLOAT, INT, INT, INT, INT,
)  # fmt: skip


def serves(cache: LayerCache, dtype: torch.dtype, params: AttentionParams) -> bool:
    """Whether this kernel computes what the layer means, on this device; the same for all its steps."""
    g = cache.spec.geometry
    assert cache.spec.k is not None
    assert cache.spec.v is not None
    return (
        g.head_dim_k == g.head_dim_v == HEAD
        and not params.softcap
        and params.scale > 0
        and dtype in (torch.float16, torch.bfloat16)
        and all(_reads(READING[side.dtype]) for side in (cache.spec.k, cache.spec.v))
        and cache.page_size >= 8
        and _available()
    )


@functools.cache
def _available() -> bool:
    reason = build.unavailable()
    if reason is not None:
        level = logging.WARNING if build.is_hopper() else logging.INFO
        logger.log(level, "steps of many queries run in the general kernel: %s", reason)
    return reason is None


def _reads(reading: Reading) -> bool:
    return reading.kind in _KINDS and reading.scaling in _SCALINGS


def shape_for(k: KVDtype, v: KVDtype) -> Shape:
    """How a launch is cut; stages: tiles in shared memory."""
    stage = _row_bytes(READING[k]) + _row_bytes(READING[v])
    stages = min(6, (_SHARED - _FIXED) // (TILE * stage))
    return Shape(ROWS, TILE, WARPS, stages, PROGRAMS)


def _row_bytes(reading: Reading) -> int:
    scale = {Scaling.NONE: 0, Scaling.ROW: 4, Scaling.ROW_ZERO: 4, Scaling.BLOCK: HEAD // 16}
    return HEAD // reading.elements * reading.word.itemsize + scale[reading.scaling]


def shared_bytes(k: KVDtype, v: KVDtype) -> int:
    """What a program asks for beside its static shared memory."""
    tiles = shape_for(k, v).stages * TILE * (_row_bytes(READING[k]) + _row_bytes(READING[v]))
    return max(_FIXED + tiles, _TURNED)


@functools.cache
def _kernel(
    k: KVDtype, v: KVDtype, heads: int, group: int, page_size: int, dtype: torch.dtype
) -> Kernel:
    shape = shape_for(k, v)
    a, b = READING[k], READING[v]
    defines = {
        **{kind.name: int(kind) for kind in _KINDS},
        **{scaling.name: int(scaling) for scaling in Scaling},
        "KIND_K": a.kind, "SCALING_K": a.scaling, "ROTATE_K": HEAD if a.rotated else 0,
        "KIND_V": b.kind, "SCALING_V": b.scaling, "ROTATE_V": HEAD if b.rotated else 0,
        "HEADS": heads, "GROUP": group, "PAGE": page_size, "STAGES": shape.stages,
        "PROGRAMS": shape.programs, "BFLOAT16": int(dtype is torch.bfloat16),
    }  # fmt: skip
    return build.build(__package__, SOURCES, "many_rows", defines, shared_bytes(k, v), _ARGUMENTS)


def launch(
    cache: LayerCache,
    q: Tensor,
    step: Step,
    params: AttentionParams,
    out: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    *,
    items: int,
    target: int,
    least: int,
) -> None:
    """Fill out, or partials of items; arguments as of `paged_attention`. q is not rotated yet."""
    spec = cache.spec
    assert spec.k is not None
    assert spec.v is not None
    a, b = READING[spec.k.dtype], READING[spec.v.dtype]
    heads = spec.geometry.num_kv_heads
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8 or q.stride(2) != 1:
        q = q.contiguous()  # rows are read 16 bytes at a time
    sinks = params.sinks
    kernel = _kernel(
        spec.k.dtype, spec.v.dtype, heads, q.shape[1] // heads, cache.page_size, q.dtype
    )
    kernel.launch(
        heads * items,
        32 * WARPS,
        (
            q.data_ptr(), q.stride(0), q.stride(1),
            *map(_address, words(cache.k, a)), *map(_address, words(cache.v, b)),
            _address(cache.k_scale), outer(cache.k_scale),
            _address(cache.v_scale), outer(cache.v_scale),
            _address(sinks), 0 if sinks is None else _SINKS[sinks.dtype],
            out.data_ptr(), partial.data_ptr(), partial_lse.data_ptr(),
            step.cu_seqlens_q.data_ptr(), step.seqlens_kv.data_ptr(),
            step.page_table.data_ptr(), step.page_table.stride(0), step.seqlens_kv.shape[0],
            params.scale, int(step.causal), params.window or 0, target, least,
        ),
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
