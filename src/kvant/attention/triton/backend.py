"""`AttentionBackend` on a GPU: writes and reads pages of every format with Triton kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvant.attention.base import AttentionBackend, AttentionParams, HeadRotation, Step
from kvant.attention.cuda import many_rows
from kvant.attention.need import FIXED_SPLIT, MOST_PARTS
from kvant.attention.triton import dense_prefill, prefill
from kvant.attention.triton.codec import READING
from kvant.attention.triton.combine import combine
from kvant.attention.triton.dense_prefill import attend_dense
from kvant.attention.triton.launch import (
    arrivals,
    has_ptx,
    is_nvidia,
    multiprocessors,
    outer,
    pad,
    rotate,
    shifts,
    stores,
    words,
)
from kvant.attention.triton.paged import paged_attention
from kvant.attention.triton.prefill import attend_long
from kvant.attention.triton.rotated_store import rotate_and_store
from kvant.attention.triton.store import store_rows
from kvant.attention.triton.tuning import (
    NEVER_SPLIT,
    Shape,
    heads_joined_at_once,
    items_aimed_at,
    parts_joined_at_once,
    shape_for,
)
from kvant.attention.triton.workmap import list_items
from kvant.kv.codecs.rotation import block_length
from kvant.kv.pool import LayerCache

MOST_JOINED = 16
"""Query rows of a sequence and KV head that the attention kernel joins itself, without another launch."""

FEWEST_JOINED = 64
"""Sequences times KV heads from which it does. With fewer a long one is cut into over a hundred items,
and many programs join those sooner than one.
"""

MOST_SCANNED = 128
"""Sequences among which every program finds its work itself."""


class TritonBackend:
    """batch_invariant: a query's result does not depend, bit for bit, on what else is in the step,
    nor on how many queries of its sequence are: one tile shape, items at fixed places.
    """

    name = "triton"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def write(self, cache: LayerCache, k: Tensor, v: Tensor, step: Step) -> None:
        """Encode k, v [T, num_kv_heads, head_dim] into `step.slot_mapping`'s slots; -1 is skipped."""
        spec = cache.spec
        assert spec.k is not None
        assert spec.v is not None
        heads = spec.geometry.num_kv_heads
        num_rows = k.shape[0] * heads
        if num_rows == 0:
            return
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        a, b = READING[spec.k.dtype], READING[spec.v.dtype]
        head_k, head_v = k.shape[-1], v.shape[-1]
        rows = 8
        counts, most_k, most_v = _counted(cache)
        store_rows[(triton.cdiv(num_rows, rows), 2)](
            k, k.stride(0), k.stride(1), *stores(cache.k), cache.k_scale,
            v, v.stride(0), v.stride(1), *stores(cache.v), cache.v_scale,
            step.slot_mapping, num_rows, counts, MOST_K=most_k, MOST_V=most_v,
            HEADS=heads, ROWS=rows, PTX=is_nvidia(k.device),
            KIND_K=int(a.kind), SCALING_K=int(a.scaling), OUTER_K=outer(cache.k_scale),
            HEAD_K=head_k, PAD_K=triton.next_power_of_2(head_k),
            ROTATION_K=block_length(head_k) if a.rotated else 0,
            KIND_V=int(b.kind), SCALING_V=int(b.scaling), OUTER_V=outer(cache.v_scale),
            HEAD_V=head_v, PAD_V=triton.next_power_of_2(head_v),
            ROTATION_V=block_length(head_v) if b.rotated else 0,
            num_warps=4,
        )  # fmt: skip

    def write_rotated(
        self, cache: LayerCache, qkv: Tensor, rotation: HeadRotation, step: Step
    ) -> Tensor:
        """As `RotatingWriter.write_rotated`."""
        spec = cache.spec
        assert spec.k is not None
        assert spec.v is not None
        g = spec.geometry
        tokens, q_heads, heads, head = qkv.shape[0], g.num_q_heads, g.num_kv_heads, g.head_dim_k
        q = qkv.new_empty(tokens, q_heads, head)
        if tokens == 0:
            return q
        a, b = READING[spec.k.dtype], READING[spec.v.dtype]
        counts, most_k, most_v = _counted(cache)
        rows = 4
        blocks = triton.cdiv(tokens * q_heads, rows) + 2 * triton.cdiv(tokens * heads, rows)
        block = block_length(head)
        rotate_and_store[(blocks,)](
            qkv, qkv.stride(0), tokens, rotation.cos, rotation.sin, step.positions,
            rotation.q_weight, rotation.k_weight, rotation.eps, q,
            *stores(cache.k), cache.k_scale, *stores(cache.v), cache.v_scale,
            step.slot_mapping, counts, MOST_K=most_k, MOST_V=most_v,
            Q_HEADS=q_heads, HEADS=heads, HEAD=head, PAD=triton.next_power_of_2(head),
            NORM=rotation.q_weight is not None, BY_POSITION=rotation.by_position,
            ROWS=rows, PTX=is_nvidia(qkv.device),
            KIND_K=int(a.kind), SCALING_K=int(a.scaling), OUTER_K=outer(cache.k_scale),
            ROTATION_K=block if a.rotated else 0,
            KIND_V=int(b.kind), SCALING_V=int(b.scaling), OUTER_V=outer(cache.v_scale),
            ROTATION_V=block if b.rotated else 0,
            num_warps=1,
        )  # fmt: skip
        return q

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """q [T, num_q_heads, head_dim_k] -> [T, num_q_heads, head_dim_v] in q's dtype.

        Tokens of sequences without stored tokens get zeros. In a captured graph, `max_seqlen_q`
        bounds every replay (and in batch-invariant mode `max_seqlen_kv` too).
        """
        if not step.long or self.batch_invariant:
            return self._attend(cache, q, step, params)
        by_cudnn = prefill.serves(cache, q, params, causal=step.causal)
        if not by_cudnn and not dense_prefill.serves(cache, q, params, causal=step.causal):
            return self._attend(cache, q, step, params)
        out = q.new_empty(q.shape[0], q.shape[1], cache.spec.geometry.head_dim_v)
        if step.rest is not None:
            count = step.rest.positions.shape[0]
            out[:count] = self._attend(cache, q[:count], step.rest, params)
        attend_all = attend_long if by_cudnn else attend_dense
        attend_all(cache, q, out, step, params)
        return out

    def _attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Everything through the paged kernel."""
        g = cache.spec.geometry
        assert cache.spec.k is not None
        assert cache.spec.v is not None
        k, v = cache.spec.k.dtype, cache.spec.v.dtype
        rows = step.max_seqlen_q * (g.num_q_heads // g.num_kv_heads)
        if self.batch_invariant:
            rows = 1
        if rows >= many_rows.FEWEST and many_rows.serves(cache, q.dtype, params):
            return attend(cache, q, step, params, many_rows.shape_for(k, v), wide=True)
        full = q.dtype is torch.float32
        crowd = 1.0
        if not self.batch_invariant:
            crowd = step.seqlens_kv.shape[0] * g.num_kv_heads / multiprocessors(q.device)
        single = step.max_seqlen_q == 1
        shape = shape_for(
            k, v, (g.head_dim_k, g.head_dim_v), rows, full=full, crowd=crowd, single=single
        )
        if self.batch_invariant:
            return attend_fixed(cache, q, step, params, shape)
        return attend(cache, q, step, params, shape)


def _counted(cache: LayerCache) -> tuple[Tensor | None, float, float]:
    """Where saturated values are counted, and the largest of K and V that are not (0: not counted)."""
    if cache.saturation is None:
        return None, 0.0, 0.0
    most_k, most_v = cache.saturation.largest
    return cache.saturation.counts, most_k or 0.0, most_v or 0.0


def backend(*, batch_invariant: bool = False) -> AttentionBackend:
    """The backend as the engine uses it."""
    return TritonBackend(batch_invariant=batch_invariant)


def attend_fixed(
    cache: LayerCache, q: Tensor, step: Step, params: AttentionParams, shape: Shape
) -> Tensor:
    """`attend` with items at fixed places, in launches whose parts are `MOST_PARTS` bytes at most.

    Lengths are the device's knowledge, so a launch has room for every item of every query.
    """
    g = cache.spec.geometry
    tokens, num_seqs = q.shape[0], step.seqlens_kv.shape[0]
    group = g.num_q_heads // g.num_kv_heads
    splits = -(-step.max_seqlen_kv // FIXED_SPLIT)
    blocks = MOST_PARTS // (4 * splits * g.num_kv_heads * shape.rows * (g.head_dim_v + 1))
    at_once = max(1, blocks // -(-group // shape.rows), (blocks - num_seqs) * shape.rows // group)
    if tokens <= at_once or (params.window is not None and not step.causal):
        return attend(cache, q, step, params, shape, fixed=True)
    out = q.new_empty(tokens, g.num_q_heads, g.head_dim_v)
    for start in range(0, tokens, at_once):
        end = min(tokens, start + at_once)
        some = _queries(step, start, end)
        out[start:end] = attend(cache, q[start:end], some, params, shape, fixed=True)
    return out


def _queries(step: Step, start: int, end: int) -> Step:
    """The step of its tokens from start to end. Not of a bidirectional window: it is measured from the
    end of a sequence's queries.
    """
    found = step.slices.get((start, end))
    if found is None:
        lengths = step.seqlens_kv
        if step.causal:
            lengths = (lengths - (step.cu_seqlens_q[1:] - end).clamp(min=0)).clamp(min=0)
        found = step.slices[start, end] = Step(
            cu_seqlens_q=step.cu_seqlens_q.clamp(start, end) - start,
            seqlens_kv=lengths,
            page_table=step.page_table,
            slot_mapping=step.slot_mapping[start:end],
            positions=step.positions[start:end],
            max_seqlen_q=min(step.max_seqlen_q, end - start),
            max_seqlen_kv=step.max_seqlen_kv,
            causal=step.causal,
        )
    return found


def attend(
    cache: LayerCache,
    q: Tensor,
    step: Step,
    params: AttentionParams,
    shape: Shape,
    *,
    fixed: bool = False,
    wide: bool = False,
) -> Tensor:
    """`TritonBackend.attend` in a given shape. fixed: items at fixed places, for batch invariance.

    wide: by the kernel for many rows, which must serve the layer.
    """
    spec = cache.spec
    g = spec.geometry
    assert spec.k is not None
    assert spec.v is not None
    k, v = READING[spec.k.dtype], READING[spec.v.dtype]
    tokens, q_heads, head_k = q.shape
    heads, head_v = g.num_kv_heads, g.head_dim_v
    group = q_heads // heads
    num_seqs = step.seqlens_kv.shape[0]
    if tokens == 0:
        return q.new_empty(0, q_heads, head_v)
    out_dtype = q.dtype
    full = q.dtype is torch.float32
    causal = step.causal
    window = params.window or 0
    scale = params.scale
    if k.rotated and not wide:
        q = rotate(q, block_length(head_k))
    elif q.stride(-1) != 1:
        q = q.contiguous()

    blocks = min(
        num_seqs * -(-step.max_seqlen_q * group // shape.rows),
        tokens * group // shape.rows + min(num_seqs, tokens),
        tokens * -(-group // shape.rows),
    )
    processors = multiprocessors(q.device)
    if wide:
        target = many_rows.items_aimed_at(blocks, heads, processors)
    else:
        target = items_aimed_at(shape, blocks, processors, heads)
    if fixed:
        least = max(1, FIXED_SPLIT // shape.tile)
        items = blocks * -(-step.max_seqlen_kv // (least * shape.tile))
        splits = items > blocks
    else:
        splits = blocks * heads < 4 * shape.programs * processors
        least = shape.least if splits else NEVER_SPLIT
        items = blocks + target if splits else blocks
    rows = step.max_seqlen_q * group
    join = 0
    few = not (wide or fixed) and rows <= MOST_JOINED and num_seqs <= MOST_SCANNED
    if few and num_seqs * heads >= FEWEST_JOINED:
        join = triton.next_power_of_2(rows)
    rotation = block_length(head_v) if v.rotated else 0
    direct = wide or join > 0 or not v.rotated
    parts = splits or not direct
    # Tokens of no sequence get zeros: from a kernel that joins, or here where there is none.
    make = torch.empty if parts or join else torch.zeros
    out = make(tokens, q_heads, head_v, dtype=out_dtype, device=q.device)
    shape_of_parts = (items, heads, shape.rows) if parts else (0, heads, shape.rows)
    partial = q.new_empty((*shape_of_parts, head_v), dtype=torch.float32)
    partial_lse = q.new_empty(shape_of_parts, dtype=torch.float32)
    arrived = arrivals(q.device, items * heads) if join else None

    work = (step.cu_seqlens_q, step.seqlens_kv)
    is_listed = num_seqs > MOST_SCANNED and shape.rows == 16 and not wide
    item_list = token_list = None
    if is_listed:
        cut = (group, shape.rows, shape.tile, causal, window > 0, fixed)
        numbers = (num_seqs, window, target, least)
        item_list = _listed(step, items, numbers, cut, tokens=False)
        token_list = (
            _listed(step, tokens, numbers, cut, tokens=True) if parts and not join else None
        )
    if wide:
        many_rows.launch(
            cache, q, step, params, out, partial, partial_lse,
            items=items, target=target, least=least,
        )  # fmt: skip
    else:
        planes = [*words(cache.k, k), *words(cache.v, v)]
        options = {} if shape.max_registers is None else {"maxnreg": shape.max_registers}
        paged_attention[(heads * items,)](
            q, q.stride(0), q.stride(1), *planes, shifts(q.device, k, v),
            cache.k_scale, cache.v_scale, params.sinks,
            out, partial, partial_lse,
            *work, item_list, step.page_table, step.page_table.stride(0), num_seqs, arrived, tokens,
            scale, params.softcap, window, target, least,
            GROUP=group, HEADS=heads, HEAD_K=head_k, HEAD_V=head_v,
            PAGE=cache.page_size, ROWS=shape.rows, TILE=shape.tile,
            KIND_K=int(k.kind), SCALING_K=int(k.scaling), ELEMENTS_K=k.elements,
            FACTOR_K=k.factor, PAD_K=pad(head_k, k),
            KIND_V=int(v.kind), SCALING_V=int(v.scaling), ELEMENTS_V=v.elements,
            FACTOR_V=v.factor, PAD_V=pad(head_v, v),
            K_OUTER=outer(cache.k_scale), V_OUTER=outer(cache.v_scale),
            CAUSAL=causal, WINDOW=window > 0, SOFTCAP=params.softcap > 0, SINKS=params.sinks is not None,
            FULL=full, DIRECT=direct, FIXED=fixed, LISTED=is_listed, PTX=has_ptx(q.device),
            JOIN=join, AT_ONCE=shape.joined_at_once(join), ROTATION=rotation if direct else 0,
            num_warps=shape.warps, num_stages=shape.stages, **options,
        )  # fmt: skip
    if parts and not join:
        per_program = heads_joined_at_once(tokens, q_heads)
        # Fixed items are joined in one order whatever the batch is.
        at_once, warps = (8, 1) if fixed else parts_joined_at_once(items, blocks)
        combine[(q_heads * tokens // per_program,)](
            partial, partial_lse, params.sinks, out, *work, token_list, num_seqs, window, target, least,
            per_program,
            GROUP=group, HEADS=heads, HEAD_V=head_v, PAD=triton.next_power_of_2(head_v),
            ROWS=shape.rows, TILE=shape.tile, AT_ONCE=at_once,
            CAUSAL=causal, WINDOW=window > 0, SINKS=params.sinks is not None,
            DIRECT=direct, FIXED=fixed, SEARCH=not wide, LISTED=is_listed, ROTATION=rotation,
            num_warps=warps,
        )  # fmt: skip
    return out


def _listed(
    step: Step,
    count: int,
    numbers: tuple[int, int, int, int],
    cut: tuple[int, int, int, bool, bool, bool],
    *,
    tokens: bool,
) -> Tensor:
    """The step's items, or its tokens, as `list_items` finds them: once for all layers cut alike."""
    key = (count, numbers, cut, tokens)
    found = step.lists.get(key)
    if found is None:
        found = step.seqlens_kv.new_empty(count, 4)
        group, rows, tile, causal, window, fixed = cut
        list_items[(count,)](
            found, step.cu_seqlens_q, step.seqlens_kv, *numbers,
            GROUP=group, ROWS=rows, TILE=tile, CAUSAL=causal, WINDOW=window, FIXED=fixed,
            TOKENS=tokens, num_warps=1,
        )  # fmt: skip
        step.lists[key] = found
    return found
