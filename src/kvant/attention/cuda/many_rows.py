"""Launches `many_rows.cu`: verification of drafts, and other steps of many queries, on Hopper.

With many rows (query, head of the group) the matrix products cost as much as the reads. Triton cannot make
decoded keys and values the register operands of `wgmma`; this kernel does, and reads a quantised cache at
the speed of its bytes.
"""

from __future__ import annotations

import functools
from importlib.resources import files

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.launching import Shape, address, outer, plane_addresses
from kvant.kernels.cuda import build
from kvant.kernels.cuda.build import FLOAT, INT, LONG, POINTER, Kernel
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Granularity, Rotation
from kvant.kv.pool import LayerCache

HEAD = 128
ROWS = 64
TILE = 64
WARPS = 8
PROGRAMS = 2
"""Programs per multiprocessor: four warpgroups of 128 registers per thread."""
FEWEST = 33
"""Minimum number of rows for which this kernel is faster than the general one."""

_PACKAGE = files(__package__)
_SINKS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_SHARED = 227 * 1024 // PROGRAMS - 5 * 1024
"""Maximum dynamic shared memory of a program: all programs of a multiprocessor fit beside static memory."""
_FIXED = 1024 + ROWS * HEAD * 2 + 2 * TILE * ROWS * 2  # alignment, queries, probabilities twice
_TURNED = 1024 + ROWS * HEAD * 2 + ROWS * (HEAD + 4) * 4  # queries, output during rotation
_LEAST_COPY = 4
"""Minimum bytes of a copy to shared memory: shorter scales are copied with a neighbour's."""
_WITHOUT_FEEDBACK = {
    KVDtype.INT4_FEEDBACK: KVDtype.INT4_PER_TOKEN_HEAD,
    KVDtype.INT4_SHORT_FEEDBACK: KVDtype.INT4_SHORT,
}
_ARGUMENTS = (
    POINTER, LONG, LONG, POINTER, POINTER, POINTER, POINTER, POINTER, INT, POINTER, INT, POINTER, INT,
    POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, LONG, INT, FLOAT, INT, INT, INT, INT, INT,
)  # fmt: skip


def serves(cache: LayerCache, dtype: torch.dtype, params: AttentionParams) -> bool:
    """Whether this kernel serves the layer on this device. The answer is the same for all steps.

    dtype: of the queries.
    """
    g = cache.spec.geometry
    assert cache.spec.k is not None
    assert cache.spec.v is not None
    return (
        g.head_dim_k == g.head_dim_v == HEAD
        and not params.softcap
        and params.scale > 0
        and dtype in (torch.float16, torch.bfloat16)
        and {cache.spec.k.dtype, cache.spec.v.dtype} <= SERVED
        and cache.page_size >= 8
        and build.available("steps of many queries run in the general kernel")
    )


def _stored_as(dtype: KVDtype) -> KVDtype:
    """Returns the format with the same bytes: error feedback changes only the writer."""
    return _WITHOUT_FEEDBACK.get(dtype, dtype)


def _format_source(dtype: KVDtype) -> str:
    """Returns the format's file, named like its codec; it has a struct named like the format."""
    return f"formats/{_stored_as(dtype).format.codec}.cuh"


SERVED = frozenset(
    dtype
    for dtype in KVDtype
    if _PACKAGE.joinpath(_format_source(dtype)).is_file() and not dtype.format.device_only
)
"""Formats that the kernel reads."""


def sources(k: KVDtype, v: KVDtype) -> tuple[str, ...]:
    """Returns the kernel's source files, in the order in which they are concatenated."""
    formats = dict.fromkeys((_format_source(k), _format_source(v)))
    return ("hopper.cuh", "codes.cuh", *formats, "items.cuh", "many_rows.cu")


def shape_for(k: KVDtype, v: KVDtype) -> Shape:
    """Returns a launch's tile sizes; stages: tiles in shared memory."""
    stages = min(6, (_SHARED - _FIXED) // (TILE * _row_of_tile(k, v)))
    return Shape(ROWS, TILE, WARPS, stages, PROGRAMS)


def shared_bytes(k: KVDtype, v: KVDtype) -> int:
    """Returns a program's bytes of dynamic shared memory."""
    tiles = shape_for(k, v).stages * TILE * _row_of_tile(k, v)
    return max(_FIXED + tiles, _TURNED)


def _row_of_tile(k: KVDtype, v: KVDtype) -> int:
    """Returns the bytes of one token's keys and values in shared memory."""
    of_k, of_v = _side_defines("K", k), _side_defines("V", v)
    found = of_k["BYTES_K"], of_k["SB_K"], of_v["BYTES_V"], of_v["SB_V"]
    return sum(map(int, found))


@functools.cache
def _kernel(
    k: KVDtype, v: KVDtype, heads: int, group: int, page_size: int, dtype: torch.dtype
) -> Kernel:
    shape = shape_for(k, v)
    defines = {
        **_side_defines("K", k), **_side_defines("V", v),
        "HEADS": heads, "GROUP": group, "PAGE": page_size, "STAGES": shape.stages,
        "PROGRAMS": shape.programs, "THREADS": 32 * WARPS, "BFLOAT16": int(dtype is torch.bfloat16),
    }  # fmt: skip
    shared = shared_bytes(k, v)
    return build.build(__package__, sources(k, v), "many_rows", defines, shared, _ARGUMENTS)


def _side_defines(side: str, dtype: KVDtype) -> dict[str, int | str]:
    """Returns macros for the format of K or of V: its struct, and facts of its declaration."""
    format = dtype.format
    codes, *scales = format.planes(HEAD)
    scale_bytes = sum(plane.row_bytes for plane in scales)
    per_row = bool(scales) and format.granularity is Granularity.TOKEN_HEAD
    return {
        f"FORMAT_{side}": _stored_as(dtype).format.name,
        f"BYTES_{side}": codes.row_bytes,
        f"SB_{side}": max(scale_bytes, _LEAST_COPY) if scales else 0,
        f"PAGE_SB_{side}": scale_bytes,
        f"SCALED_{side}": int(per_row),
        f"ROTATE_{side}": HEAD if format.rotation is Rotation.HADAMARD else 0,
    }


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
    """Attends to q [T, num_q_heads, head_dim], not rotated yet; writes `out`, or partial results of items.

    out: [T, num_q_heads, head_dim_v]. partial, partial_lse, items, target, least: as in `paged_attention`.
    """
    spec = cache.spec
    assert spec.k is not None
    assert spec.v is not None
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
            *plane_addresses(cache.k), *plane_addresses(cache.v),
            address(cache.k_scale), outer(cache.k_scale),
            address(cache.v_scale), outer(cache.v_scale),
            address(sinks), 0 if sinks is None else _SINKS[sinks.dtype],
            out.data_ptr(), partial.data_ptr(), partial_lse.data_ptr(),
            step.cu_seqlens_q.data_ptr(), step.seqlens_kv.data_ptr(),
            step.page_table.data_ptr(), step.page_table.stride(0), step.seqlens_kv.shape[0],
            params.scale, int(step.causal), params.window or 0, target, least,
            cache.page_stride,
        ),
    )  # fmt: skip
