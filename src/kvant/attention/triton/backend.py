"""`AttentionBackend` on a GPU: writes and reads pages of every format with Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from kvant.attention.base import (
    AttentionBackend,
    AttentionParams,
    Expand,
    HeadNorm,
    HeadRotation,
    ShortSteps,
    Step,
)
from kvant.attention.cuda import latent_rows, many_rows, one_query
from kvant.attention.launching import Shape, outer
from kvant.attention.need import FIXED_SPLIT, MOST_PARTS
from kvant.attention.triton import both_decode, dense_prefill, prefill, rotated_store
from kvant.attention.triton.combine import combine
from kvant.attention.triton.cut import Cut, cut_step, heads_joined_at_once
from kvant.attention.triton.dense_prefill import attend_dense
from kvant.attention.triton.format import format_of
from kvant.attention.triton.latent import latent_attention
from kvant.attention.triton.latent_prefill import attend_expanded
from kvant.attention.triton.launch import (
    ahead,
    lanes,
    listed_items,
    pad,
    page_units,
    rotate,
    shifts,
    stores,
    words,
)
from kvant.attention.triton.paged import NARROW, WIDE, paged_attention
from kvant.attention.triton.prefill import attend_long
from kvant.attention.triton.rotated_store import rotate_and_store
from kvant.attention.triton.store import store_rows
from kvant.attention.triton.tuning import latent_shape, shape_for
from kvant.kernels.triton.device import arrivals, has_ptx, is_nvidia, multiprocessors
from kvant.kv.codecs.rotation import block_length
from kvant.kv.pool import LayerCache

_NORMS = {
    HeadNorm.ROUNDED: rotated_store.ROUNDED,
    HeadNorm.WIDE: rotated_store.WIDE,
    HeadNorm.ONE: rotated_store.ONE,
}


_LARGEST_EXPANDED = 256
"""Maximum head size of torch's attention on GPUs."""


@dataclass(frozen=True, slots=True)
class _Form:
    """One of the two forms in which a layer with wide rows reads its keys: see `paged_attention`.

    number: NARROW or WIDE. sink, recent: as in `kvant.kv.spec.WideRows`. rows: [T, num_q_heads, head_dim_v]
    and lse: [T, num_q_heads], both float32: results of the narrow form, which the wide one joins.
    """

    number: int
    sink: int
    recent: int
    rows: Tensor
    lse: Tensor

    @property
    def is_first(self) -> bool:
        return self.number == int(NARROW.value)

    def of(self, start: int, end: int) -> _Form:
        """Returns this form with the rows of the step's tokens start .. end."""
        return replace(self, rows=self.rows[start:end], lse=self.lse[start:end])


class TritonBackend:
    """Attention of every format on GPUs.

    batch_invariant: a query's result does not depend, bit for bit, on what else is in the step, nor on how
    many queries its sequence has there: one tile shape, items at fixed places.
    """

    name = "triton"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Encodes k, v [T, num_kv_heads, head_dim] into `step.slot_mapping`'s slots; -1 is skipped.

        v: None for latents.
        """
        spec = cache.spec
        assert spec.k is not None
        if cache.wide is not None:
            self.write(cache.wide, k, v, step.of(cache.wide_group))
        heads = spec.geometry.num_kv_heads
        num_rows = k.shape[0] * heads
        if num_rows == 0:
            return
        sides, v_planes, v_format = 2, cache.v, spec.v
        if v is None:  # no program stores V
            sides, v, v_planes, v_format = 1, k, cache.k, spec.k
        assert v_format is not None
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        head_k, head_v = k.shape[-1], v.shape[-1]
        rows = 8 if sides == 2 else 1  # latents are several times as wide
        counts, most_k, most_v = _counted(cache)
        store_rows[(triton.cdiv(num_rows, rows), sides)](
            k, k.stride(0), k.stride(1), *stores(cache.k), cache.k_outside,
            v, v.stride(0), v.stride(1), *stores(v_planes), cache.v_scale,
            page_units(cache), step.slot_mapping, num_rows, counts, MOST_K=most_k, MOST_V=most_v,
            HEADS=heads, PAGE=cache.page_size, ROWS=rows, PTX=is_nvidia(k.device),
            K=format_of(spec.k.dtype), OUTER_K=outer(cache.k_scale),
            HEAD_K=head_k, PAD_K=triton.next_power_of_2(head_k),
            V=format_of(v_format.dtype), OUTER_V=outer(cache.v_scale),
            HEAD_V=head_v, PAD_V=triton.next_power_of_2(head_v),
            num_warps=4,
        )  # fmt: skip

    def write_rotated(
        self, cache: LayerCache, qkv: Tensor, rotation: HeadRotation, step: Step
    ) -> Tensor:
        """Implements `RotatingWriter.write_rotated`: qkv [T, heads * head_dim] -> q [T, heads, head_dim]."""
        if cache.wide is not None:
            self.write_rotated(cache.wide, qkv, rotation, step.of(cache.wide_group))
        spec = cache.spec
        assert spec.k is not None
        assert spec.v is not None
        g = spec.geometry
        tokens, q_heads, heads, head = qkv.shape[0], g.num_q_heads, g.num_kv_heads, g.head_dim_k
        q = qkv.new_empty(tokens, q_heads, head)
        if tokens == 0:
            return q
        counts, most_k, most_v = _counted(cache)
        rows, warps = _rotated_at_once(tokens * q_heads, qkv.device)
        blocks = triton.cdiv(tokens * q_heads, rows) + 2 * triton.cdiv(tokens * heads, rows)
        rotate_and_store[(blocks,)](
            qkv, qkv.stride(0), tokens, rotation.cos, rotation.sin, step.positions,
            rotation.q_weight, rotation.k_weight, rotation.eps, q,
            *stores(cache.k), cache.k_outside, *stores(cache.v), cache.v_scale,
            page_units(cache), step.slot_mapping, counts, MOST_K=most_k, MOST_V=most_v,
            Q_HEADS=q_heads, Q_STEP=2 if rotation.gated else 1, HEADS=heads, PAGE=cache.page_size,
            HEAD=head, PAD=triton.next_power_of_2(head),
            NORM=_norm_of(rotation), ROTARY=2 * rotation.cos.shape[-1],
            NEIGHBOURS=rotation.neighbours, BY_POSITION=rotation.by_position,
            HALVES=_turns_halves(rotation, head), ROWS=rows, PTX=is_nvidia(qkv.device),
            K=format_of(spec.k.dtype), OUTER_K=outer(cache.k_scale),
            V=format_of(spec.v.dtype), OUTER_V=outer(cache.v_scale),
            num_warps=warps, **ahead(qkv.device),
        )  # fmt: skip
        return q

    def attend_rotated(
        self,
        cache: LayerCache,
        qkv: Tensor,
        rotation: HeadRotation,
        step: Step,
        params: AttentionParams,
    ) -> Tensor | None:
        """Implements `RotatingWriter.attend_rotated`: qkv [T, heads * head_dim] -> [T, q_heads, head_dim]."""
        if not self._is_short(cache, qkv.dtype, step, params):
            return None
        if not one_query.rotates(qkv, rotation, cache, step):
            return None
        return one_query.attend_rotated(cache, qkv, rotation, step, params)

    def _is_short(
        self, cache: LayerCache, dtype: torch.dtype, step: Step, params: AttentionParams
    ) -> bool:
        """Whether `one_query` serves a step. dtype: of the queries."""
        return (
            not self.batch_invariant
            and one_query.takes(cache, step)
            and one_query.serves(cache, dtype, params)
        )

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Attends with q [T, num_q_heads, head_dim_k]; returns [T, num_q_heads, head_dim_v] in q's dtype.

        Tokens of sequences without stored tokens get zeros. In a captured graph, `max_seqlen_q`
        bounds every replay (and in batch-invariant mode `max_seqlen_kv` too).
        """
        if cache.wide is not None:
            return self._attend_both(cache, q, step, params)
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

    def short_steps(self, cache: LayerCache, dtype: torch.dtype) -> ShortSteps | None:
        """Implements `ShortReader.short_steps`."""
        return None if self.batch_invariant else one_query.short_steps(cache, dtype)

    def expands(self, q: Tensor) -> bool:
        """Implements `ExpandingBackend.expands`: q [T, heads, head_dim] in 16 bits, with heads that fit."""
        return (
            not self.batch_invariant
            and q.is_cuda
            and q.dtype in (torch.float16, torch.bfloat16)
            and q.shape[2] % 8 == 0
            and q.shape[2] <= _LARGEST_EXPANDED
        )

    def attend_expanded(
        self,
        cache: LayerCache,
        q: Tensor,
        out: Tensor,
        step: Step,
        params: AttentionParams,
        expand: Expand,
    ) -> None:
        """Implements `ExpandingBackend.attend_expanded`: q, out [T, num_q_heads, head_dim]."""
        attend_expanded(cache, q, out, step, params, expand)

    def _attend_both(
        self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams
    ) -> Tensor:
        """Implements `attend` for a layer with wide rows, in one launch if that kernel serves the step.

        Otherwise it reads the narrow form of the keys first, then the wide one.
        """
        wide = cache.spec.wide
        assert wide is not None
        assert cache.wide is not None
        if not self.batch_invariant and both_decode.serves(cache, step):
            return both_decode.attend(cache, q, step, params)
        rows = q.new_empty(*q.shape[:2], cache.spec.geometry.head_dim_v, dtype=torch.float32)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        narrow = _Form(int(NARROW.value), wide.sink, wide.recent, rows, lse)
        self._attend(cache, q, step, replace(params, sinks=None), narrow)
        rest = replace(narrow, number=int(WIDE.value))
        recent = replace(params, window=wide.recent)
        return self._attend(cache.wide, q, step.of(cache.wide_group), recent, rest)

    def _attend(
        self,
        cache: LayerCache,
        q: Tensor,
        step: Step,
        params: AttentionParams,
        form: _Form | None = None,
    ) -> Tensor:
        """Attends to all queries with the paged kernel."""
        g = cache.spec.geometry
        assert cache.spec.k is not None
        rows = step.max_seqlen_q * (g.num_q_heads // g.num_kv_heads)
        if self.batch_invariant:
            rows = 1
        if cache.spec.v is None:
            if not self.batch_invariant and latent_rows.serves(cache, q.dtype):
                return attend(cache, q, step, params, latent_rows.SHAPE, wide=True)
            shape = latent_shape(cache.spec.k.dtype, full=q.dtype is torch.float32)
            if self.batch_invariant:
                return attend_fixed(cache, q, step, params, shape)
            return attend(cache, q, step, params, shape)
        k, v = cache.spec.k.dtype, cache.spec.v.dtype
        is_one_form = form is None
        if is_one_form and self._is_short(cache, q.dtype, step, params):
            return one_query.attend(cache, q, step, params)
        if is_one_form and rows >= many_rows.FEWEST and many_rows.serves(cache, q.dtype, params):
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
            return attend_fixed(cache, q, step, params, shape, form)
        return attend(cache, q, step, params, shape, form=form)


def _rotated_at_once(rows: int, device: torch.device) -> tuple[int, int]:
    """Returns the rows and warps of a program that rotates: few if a step has few rows, which then take less
    time; more if programs of one warp would fill the device's places for programs but not its warps.
    """
    return (4, 1) if rows <= 64 * multiprocessors(device) else (16, 4)


def _turns_halves(rotation: HeadRotation, head: int) -> bool:
    """Whether a rotation turns pairs (c, c + head / 2) of the whole head, whose size is a power of two."""
    whole = 2 * rotation.cos.shape[-1] == head == triton.next_power_of_2(head)
    return whole and not rotation.neighbours


def _norm_of(rotation: HeadRotation) -> int:
    found = rotated_store.NO_NORM if rotation.q_weight is None else _NORMS[rotation.norm]
    return int(found.value)


def _counted(cache: LayerCache) -> tuple[Tensor | None, float, float]:
    """Returns where saturated values are counted, and the largest unsaturated of K and V (0: not counted)."""
    if cache.saturation is None:
        return None, 0.0, 0.0
    most_k, most_v = cache.saturation.largest
    return cache.saturation.counts, most_k or 0.0, most_v or 0.0


def backend(*, batch_invariant: bool = False) -> AttentionBackend:
    """Builds the backend for the engine."""
    return TritonBackend(batch_invariant=batch_invariant)


def attend_fixed(
    cache: LayerCache,
    q: Tensor,
    step: Step,
    params: AttentionParams,
    shape: Shape,
    form: _Form | None = None,
) -> Tensor:
    """Attends like `attend`, with items at fixed positions, and at most `MOST_PARTS` bytes of parts at once.

    q: [T, num_q_heads, head_dim_k]; returns [T, num_q_heads, head_dim_v]. Only the device knows the
    lengths, so a launch has room for every item of every query.
    """
    g = cache.spec.geometry
    tokens, num_seqs = q.shape[0], step.seqlens_kv.shape[0]
    group = g.num_q_heads // g.num_kv_heads
    splits = -(-step.max_seqlen_kv // FIXED_SPLIT)
    blocks = MOST_PARTS // (4 * splits * g.num_kv_heads * shape.rows * (g.head_dim_v + 1))
    at_once = max(1, blocks // -(-group // shape.rows), (blocks - num_seqs) * shape.rows // group)
    if tokens <= at_once or (params.window is not None and not step.causal):
        return attend(cache, q, step, params, shape, fixed=True, form=form)
    out = q.new_empty(tokens, g.num_q_heads, g.head_dim_v)
    for start in range(0, tokens, at_once):
        end = min(tokens, start + at_once)
        some = _queries(step, start, end)
        part = None if form is None else form.of(start, end)
        out[start:end] = attend(cache, q[start:end], some, params, shape, fixed=True, form=part)
    return out


def _queries(step: Step, start: int, end: int) -> Step:
    """Returns a step with tokens start .. end only.

    Not for bidirectional windows, which are measured from the end of a sequence's queries.
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
    form: _Form | None = None,
) -> Tensor:
    """Attends with q [T, num_q_heads, head_dim_k] in launches of a given shape.

    Returns [T, num_q_heads, head_dim_v]. fixed: items end at fixed positions, for batch invariance. wide: use
    the CUDA kernel for many rows, or the one for latents, which must serve the layer. form: read the keys of
    one form; the first form returns its float32 rows.
    """
    spec = cache.spec
    assert spec.k is not None
    k, v = format_of(spec.k.dtype), format_of((spec.v or spec.k).dtype)
    tokens, q_heads, head_k = q.shape
    heads, head_v = spec.geometry.num_kv_heads, spec.geometry.head_dim_v
    if tokens == 0:
        return q.new_empty(0, q_heads, head_v)
    cut = cut_step(
        shape,
        tokens=tokens,
        num_seqs=step.seqlens_kv.shape[0],
        max_seqlen_q=step.max_seqlen_q,
        heads=heads,
        group=q_heads // heads,
        multiprocessors=multiprocessors(q.device),
        rotated=v.rotated,
        joins=spec.v is not None,
        wide=wide,
        fixed_seqlen_kv=step.max_seqlen_kv if fixed else None,
        window=params.window or 0,
    )
    out_dtype = q.dtype
    if k.rotated and not wide:
        q = rotate(q, block_length(head_k))
    elif q.stride(-1) != 1:
        q = q.contiguous()
    # Tokens of no sequence get zeros: from a kernel that joins parts, or here if none does.
    make = torch.empty if cut.parts or cut.join else torch.zeros
    if form is not None and form.is_first:
        out = form.rows
    else:
        out = make(tokens, q_heads, head_v, dtype=out_dtype, device=q.device)
    shape_of_parts = (cut.items if cut.parts else 0, heads, shape.rows)
    partial = q.new_empty((*shape_of_parts, head_v), dtype=torch.float32)
    partial_lse = q.new_empty(shape_of_parts, dtype=torch.float32)
    if wide:
        sizes = {"items": cut.items, "target": cut.target, "least": cut.least}
        if spec.v is None:
            latent_rows.launch(cache, q, step, params, out, partial, partial_lse, shape, **sizes)
        else:
            many_rows.launch(cache, q, step, params, out, partial, partial_lse, **sizes)
    elif spec.v is None:
        _launch_latents(cache, q, step, params, cut, out, partial, partial_lse)
    else:
        full = out_dtype is torch.float32
        _launch_items(cache, q, step, params, cut, out, partial, partial_lse, form, full=full)
    if cut.combines:
        _launch_combine(cache, step, params, cut, out, partial, partial_lse, form, search=not wide)
    return out


def _launch_items(
    cache: LayerCache,
    q: Tensor,
    step: Step,
    params: AttentionParams,
    cut: Cut,
    out: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    form: _Form | None,
    *,
    full: bool,
) -> None:
    """Writes out, or partial results of items. q: rotated if K is. full: products in float32."""
    spec, shape, device = cache.spec, cut.shape, q.device
    assert spec.k is not None
    assert spec.v is not None
    k, v = format_of(spec.k.dtype), format_of(spec.v.dtype)
    head_k, head_v = spec.geometry.head_dim_k, spec.geometry.head_dim_v
    window = params.window or 0
    listed = listed_items(step, cut, window, tokens=False) if cut.listed else None
    arrived = arrivals(device, cut.items * cut.heads) if cut.join else None
    options = {} if shape.max_registers is None else {"maxnreg": shape.max_registers}
    options |= ahead(device)
    paged_attention[(cut.heads * cut.items,)](
        q, q.stride(0), q.stride(1), *words(cache.k, k), *words(cache.v, v), shifts(device, k, v),
        page_units(cache),
        cache.k_scale, cache.v_scale, params.sinks,
        out, partial, partial_lse, *_narrow(form),
        step.cu_seqlens_q, step.seqlens_kv, listed, step.page_table, step.page_table.stride(0),
        cut.num_seqs, arrived, cut.tokens,
        params.scale, params.softcap, window, cut.target, cut.least,
        0 if form is None else form.sink, 0 if form is None else form.recent,
        GROUP=cut.group, HEADS=cut.heads, PAGE=cache.page_size, ROWS=shape.rows, TILE=shape.tile,
        K=k, HEAD_K=head_k, PAD_K=pad(head_k, k), V=v, HEAD_V=head_v, PAD_V=pad(head_v, v),
        K_OUTER=outer(cache.k_scale), V_OUTER=outer(cache.v_scale),
        CAUSAL=step.causal, WINDOW=window > 0, SOFTCAP=params.softcap > 0, SINKS=params.sinks is not None,
        FULL=full, DIRECT=cut.direct, FIXED=cut.fixed, LISTED=cut.listed, PTX=has_ptx(device),
        JOIN=cut.join, AT_ONCE=shape.joined_at_once(cut.join), FORM=0 if form is None else form.number,
        EARLY=cut.early, LANES=lanes(cut.num_seqs), MASKED=shape.masked,
        num_warps=shape.warps, num_stages=shape.stages, **options,
    )  # fmt: skip


def _launch_latents(
    cache: LayerCache,
    q: Tensor,
    step: Step,
    params: AttentionParams,
    cut: Cut,
    out: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
) -> None:
    """Writes out, or partial results of items, for a layer of latents."""
    spec, shape, device = cache.spec, cut.shape, q.device
    assert spec.k is not None
    k, width = format_of(spec.k.dtype), spec.geometry.head_dim_k
    latent = spec.geometry.head_dim_v
    options = {} if shape.max_registers is None else {"maxnreg": shape.max_registers}
    latent_attention[(cut.items,)](
        q, q.stride(0), q.stride(1), *words(cache.k, k), page_units(cache), cache.k_scale,
        out, partial, partial_lse,
        step.cu_seqlens_q, step.seqlens_kv, listed_items(step, cut, 0, tokens=False) if cut.listed else None,
        step.page_table, step.page_table.stride(0), cut.num_seqs,
        params.scale, cut.target, cut.least,
        GROUP=cut.group, PAGE=cache.page_size, ROWS=shape.rows, TILE=shape.tile,
        K=k, LATENT=latent, ROTARY=width - latent, PAD_L=pad(latent, k), PAD_R=pad(width - latent, k),
        OUTER=outer(cache.k_scale), FULL=q.dtype is torch.float32,
        DIRECT=cut.direct, FIXED=cut.fixed, LISTED=cut.listed, PTX=has_ptx(device),
        EARLY=cut.early, LANES=lanes(cut.num_seqs),
        num_warps=shape.warps, num_stages=shape.stages, **options, **ahead(device),
    )  # fmt: skip


def _launch_combine(
    cache: LayerCache,
    step: Step,
    params: AttentionParams,
    cut: Cut,
    out: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    form: _Form | None,
    *,
    search: bool,
) -> None:
    """Joins partial results into out. search: see `workmap.tiles_per_split`."""
    shape, head_v, q_heads = cut.shape, cache.spec.geometry.head_dim_v, cut.heads * cut.group
    rotated = cache.spec.v is not None and format_of(cache.spec.v.dtype).rotated
    window = params.window or 0
    listed = listed_items(step, cut, window, tokens=True) if cut.listed else None
    per_program = heads_joined_at_once(cut.tokens, q_heads)
    at_once, warps = cut.parts_joined_at_once
    width = triton.next_power_of_2(head_v)
    warps = max(warps, at_once * width // 4096)  # 128 numbers per thread: more would spill
    combine[(q_heads * cut.tokens // per_program,)](
        partial, partial_lse, params.sinks, out, *_narrow(form),
        step.cu_seqlens_q, step.seqlens_kv, listed,
        cut.num_seqs, window, cut.target, cut.least, per_program,
        GROUP=cut.group, HEADS=cut.heads, HEAD_V=head_v, PAD=width,
        ROWS=shape.rows, TILE=shape.tile, AT_ONCE=at_once,
        CAUSAL=step.causal, WINDOW=window > 0, SINKS=params.sinks is not None,
        DIRECT=cut.direct, FIXED=cut.fixed, SEARCH=search, LISTED=cut.listed,
        ROTATION=block_length(head_v) if rotated else 0, FORM=0 if form is None else form.number,
        EARLY=cut.early, LANES=lanes(cut.num_seqs), num_warps=warps, **ahead(out.device),
    )  # fmt: skip


def _narrow(form: _Form | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if form is None else (form.rows, form.lse)
