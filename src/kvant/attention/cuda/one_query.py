"""Launches `one_query.cu`: decode steps of few sequences with short contexts, on Hopper.

Such a step reads so few keys that it waits for latencies, not for memory. The kernel copies stored rows while
the kernels before it still run, and clusters of programs join their results in shared memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, HeadNorm, HeadRotation, ShortSteps, Step
from kvant.attention.launching import address, outer, plane_addresses
from kvant.kernels.cuda import build
from kvant.kernels.cuda.build import FLOAT, INT, LONG, POINTER, Kernel
from kvant.kv.dtype import KVDtype
from kvant.kv.format import ScalePlace
from kvant.kv.pool import LayerCache
from kvant.kv.spec import LayerSpec

LONGEST = 1024
"""The longest context, in tokens, of a step that this kernel reads in 16 bits."""
LONGEST_EIGHT = 512
"""The same in 8 bits. The general kernel reads longer contexts in 8 bits as fast as this one."""
HEADS = (64, 128, 256)
"""Head sizes that it serves."""
MOST_GROUPED = 8
"""Most query heads that share a KV head."""
MOST_PAIRS = 512
"""Most sequences times KV heads of a step that this kernel reads."""
MOST_PAIRS_EIGHT = 256
"""The same in 8 bits, for heads of up to 128 numbers: the general kernel reads 512 pairs faster."""

_CHUNK = 16
EIGHT = frozenset(
    {
        KVDtype.FP8_E4M3,
        KVDtype.FP8_E5M2,
        KVDtype.FP8_PER_TOKEN_HEAD,
        KVDtype.INT8_PER_TOKEN_HEAD,
    }
)
"""Formats of 8 bits that it reads, in any pair. It reads 16 bits where the model computes in them."""

_STORED = {torch.bfloat16: KVDtype.BFLOAT16, torch.float16: KVDtype.FLOAT16}
_SINKS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_ARGUMENTS = (
    POINTER, LONG, LONG, POINTER, POINTER, INT, POINTER, INT, POINTER,
    POINTER, POINTER, POINTER, LONG, INT, INT, FLOAT, INT,
    POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, FLOAT,
    POINTER, POINTER, POINTER, INT, POINTER, INT,
)  # fmt: skip
_NORMS = {None: 0, HeadNorm.ROUNDED: 1, HeadNorm.WIDE: 2, HeadNorm.ONE: 3}
_ANGLES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


class Shape(NamedTuple):
    """cluster: programs of one sequence and KV head. stages: chunks of 16 tokens that a warp copies ahead."""

    cluster: int
    warps: int
    stages: int


def short_steps(cache: LayerCache, dtype: torch.dtype) -> ShortSteps | None:
    """Returns the steps that this kernel takes, or None if it cannot read the layer for such queries."""
    heads, most = cache.spec.geometry.num_kv_heads, _most_pairs(cache.spec)
    if not _reads(cache.spec, dtype) or heads > most:
        return None
    return ShortSteps(_longest(cache.spec), most // heads)


def takes(cache: LayerCache, step: Step) -> bool:
    """Whether a step is one of `short_steps`."""
    pairs = step.seqlens_kv.shape[0] * cache.spec.geometry.num_kv_heads
    return (
        step.causal
        and step.max_seqlen_q == 1
        and step.max_seqlen_kv <= _longest(cache.spec)
        and pairs <= _most_pairs(cache.spec)
    )


def _longest(spec: LayerSpec) -> int:
    return LONGEST_EIGHT if _is_eight(spec) else LONGEST


def _most_pairs(spec: LayerSpec) -> int:
    return MOST_PAIRS_EIGHT if _is_eight(spec) and spec.geometry.head_dim_k <= 128 else MOST_PAIRS


def _is_eight(spec: LayerSpec) -> bool:
    return spec.k is not None and spec.k.dtype in EIGHT


def serves(cache: LayerCache, dtype: torch.dtype, params: AttentionParams) -> bool:
    """Whether this kernel reads the layer on this device. dtype: of the queries."""
    return not params.softcap and params.scale > 0 and _reads(cache.spec, dtype)


def _reads(spec: LayerSpec, dtype: torch.dtype) -> bool:
    g = spec.geometry
    return (
        spec.k is not None
        and spec.v is not None
        and spec.wide is None
        and (
            spec.k.dtype is spec.v.dtype is _STORED.get(dtype)
            or (dtype in _STORED and {spec.k.dtype, spec.v.dtype} <= EIGHT)
        )
        and g.causal
        and g.head_dim_k == g.head_dim_v
        and g.head_dim_k in HEADS
        and g.num_q_heads // g.num_kv_heads <= MOST_GROUPED
        and not g.softcap
        and build.available("decode steps of short contexts run in the general kernel")
    )


def sources(k: KVDtype, v: KVDtype, turn: Turn | None = None) -> tuple[str, ...]:
    """Returns the kernel's source files, in order of their concatenation. turn: as in `macros`."""
    if k in EIGHT:
        formats = dict.fromkeys(f"formats/{dtype.format.codec}.cuh" for dtype in (k, v))
        return ("hopper.cuh", "one_query.cuh", *formats, "one_query.cu")
    return ("hopper.cuh", *(() if turn is None else ("turned_heads.cuh",)), "one_query.cu")


def shape_for(num_seqs: int, heads: int, head: int, k: KVDtype = KVDtype.BFLOAT16) -> Shape:
    """Returns the shape that was fastest for a step. heads: of K and V, of `head` numbers stored as `k`."""
    pairs = num_seqs * heads
    if pairs > 256 or (pairs > 128 and head == 256):
        return Shape(1, 2, 3)
    cluster = 8 if pairs <= 16 else 4 if pairs <= 32 else 2 if pairs <= 128 else 1
    return Shape(cluster, 4 if head == 256 else 8, 2 if k in EIGHT else 1)


def shared_bytes(shape: Shape, head: int, k: KVDtype = KVDtype.BFLOAT16) -> int:
    """Returns a program's bytes of dynamic shared memory. head: numbers of a head, stored as `k`."""
    row = head if k in EIGHT else 2 * head
    return shape.warps * shape.stages * 2 * _CHUNK * (row + 16)


class Turn(NamedTuple):
    """How the kernel itself normalises and rotates heads, as numbers for macros; see `HeadRotation`.

    norm: 0 for none, else a value of `_NORMS`. rotary: rotated numbers of a head. q_step: heads of q from one
    query head to the next, 2 with gates. angle_bytes: bytes of a cosine.
    """

    norm: int
    rotary: int
    neighbours: bool
    by_position: bool
    q_step: int
    angle_bytes: int

    @staticmethod
    def of(rotation: HeadRotation) -> Turn:
        norm = None if rotation.q_weight is None else rotation.norm
        return Turn(
            _NORMS[norm], 2 * rotation.cos.shape[-1], rotation.neighbours, rotation.by_position,
            2 if rotation.gated else 1, _ANGLES[rotation.cos.dtype],
        )  # fmt: skip


class Layer(NamedTuple):
    """What the kernel is compiled for, apart from its shape.

    heads: of K and V, each of `head` numbers and `group` query heads. dtype: of the queries.
    """

    k: KVDtype
    v: KVDtype
    head: int
    heads: int
    group: int
    page_size: int
    dtype: torch.dtype

    @staticmethod
    def of(cache: LayerCache, dtype: torch.dtype) -> Layer:
        g = cache.spec.geometry
        assert cache.spec.k is not None
        assert cache.spec.v is not None
        return Layer(
            cache.spec.k.dtype, cache.spec.v.dtype, g.head_dim_k, g.num_kv_heads,
            g.num_q_heads // g.num_kv_heads, cache.page_size, dtype,
        )  # fmt: skip


def macros(shape: Shape, layer: Layer, turn: Turn | None = None) -> dict[str, int | str]:
    """Returns the macros of the source. turn: None if queries are rotated, and keys and values are stored."""
    more = (
        {} if turn is None else {key.upper(): int(value) for key, value in turn._asdict().items()}
    )
    return {
        "HEAD": layer.head, "HEADS": layer.heads, "GROUP": layer.group, "PAGE": layer.page_size,
        "CLUSTER": shape.cluster, "WARPS": shape.warps, "STAGES": shape.stages,
        "SHARED_BYTES": shared_bytes(shape, layer.head, layer.k),
        "EIGHT": int(layer.k in EIGHT), "FORMAT_K": layer.k.format.name, "FORMAT_V": layer.v.format.name,
        "SCALED_K": int(layer.k.format.scale_place is ScalePlace.PLANE),
        "SCALED_V": int(layer.v.format.scale_place is ScalePlace.PLANE),
        "BFLOAT16": int(layer.dtype is torch.bfloat16), "ROTATES": int(turn is not None), **more,
    }  # fmt: skip


@functools.cache
def _kernel(shape: Shape, layer: Layer, turn: Turn | None) -> Kernel:
    defines, shared = macros(shape, layer, turn), shared_bytes(shape, layer.head, layer.k)
    files = sources(layer.k, layer.v, turn)
    return build.build(__package__, files, "one_query", defines, shared, _ARGUMENTS)


def rotates(qkv: Tensor, rotation: HeadRotation, cache: LayerCache, step: Step) -> bool:
    """Whether `attend_rotated` serves rows qkv [T, heads * head_dim] of a step that the kernel takes."""
    weights = (rotation.q_weight, rotation.k_weight)
    return (
        len(qkv) == step.seqlens_kv.shape[0]
        and cache.k[0].dtype is qkv.dtype
        and cache.saturation is None
        and rotation.cos.shape[-1] % 2 == 0
        and rotation.cos.dtype in (qkv.dtype, torch.float32)
        and rotation.cos.is_contiguous()
        and rotation.sin.is_contiguous()
        and all(weight is None or weight.dtype is qkv.dtype for weight in weights)
        and qkv.data_ptr() % 4 == 0
        and qkv.stride(0) % 2 == 0
        and qkv.stride(1) == 1
    )


def attend(
    cache: LayerCache, q: Tensor, step: Step, params: AttentionParams, shape: Shape | None = None
) -> Tensor:
    """Attends with q [T, num_q_heads, head_dim], at most one query for each sequence.

    Returns [T, num_q_heads, head_dim] in q's dtype; tokens of no sequence get zeros. shape: None for the one
    that was fastest.
    """
    if q.data_ptr() % 8 or q.stride(0) % 4 or q.stride(1) % 4 or q.stride(2) != 1:
        q = q.contiguous()  # rows are read 8 bytes at a time
    return _launch(cache, q, q.stride(0), q.stride(1), step, params, shape, None)


def attend_rotated(
    cache: LayerCache,
    qkv: Tensor,
    rotation: HeadRotation,
    step: Step,
    params: AttentionParams,
    shape: Shape | None = None,
) -> Tensor:
    """Implements `RotatingWriter.attend_rotated` for qkv [T, heads * head_dim], one row for each sequence."""
    return _launch(cache, qkv, qkv.stride(0), 0, step, params, shape, rotation)


def _launch(
    cache: LayerCache,
    rows: Tensor,
    row_stride: int,
    head_stride: int,
    step: Step,
    params: AttentionParams,
    shape: Shape | None,
    rotation: HeadRotation | None,
) -> Tensor:
    """Returns [T, num_q_heads, head_dim]. rows: queries; with `rotation`, also keys and values."""
    layer = Layer.of(cache, rows.dtype)
    tokens, num_seqs = len(rows), step.seqlens_kv.shape[0]
    out = rows.new_empty(tokens, layer.heads * layer.group, layer.head)
    if tokens == 0:
        return out
    shape = shape or shape_for(num_seqs, layer.heads, layer.head, layer.k)
    kernel = _kernel(shape, layer, None if rotation is None else Turn.of(rotation))
    sinks = params.sinks
    turned: tuple[object, ...] = (0, 0, 0, 0, 0, 0, 0.0)
    if rotation is not None:
        turned = (
            rotation.cos.data_ptr(), rotation.sin.data_ptr(), step.positions.data_ptr(),
            step.slot_mapping.data_ptr(), address(rotation.q_weight), address(rotation.k_weight),
            rotation.eps,
        )  # fmt: skip
    (k_codes, k_scales), (v_codes, v_scales) = map(plane_addresses, (cache.k, cache.v))
    kernel.launch(
        (shape.cluster * layer.heads, num_seqs),
        32 * shape.warps,
        (
            rows.data_ptr(), row_stride, head_stride, k_codes, v_codes,
            cache.page_stride, address(sinks), 0 if sinks is None else _SINKS[sinks.dtype],
            out.data_ptr(), step.cu_seqlens_q.data_ptr(), step.seqlens_kv.data_ptr(),
            step.page_table.data_ptr(), step.page_table.stride(0), tokens, num_seqs,
            params.scale, params.window or 0, *turned, k_scales, v_scales,
            address(cache.k_scale), outer(cache.k_scale), address(cache.v_scale), outer(cache.v_scale),
        ),
        ahead=True,
    )  # fmt: skip
    return out
