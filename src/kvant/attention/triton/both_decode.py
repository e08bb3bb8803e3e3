"""Launches of `both_attention`: decode steps and short drafts of layers with wide rows."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.launching import outer
from kvant.attention.triton.both import both_attention, combine_both
from kvant.attention.triton.cut import Cut, cut_step, heads_joined_at_once
from kvant.attention.triton.format import format_of
from kvant.attention.triton.launch import (
    ahead,
    lanes,
    listed_items,
    pad,
    page_units,
    rotate,
    shifts,
    words,
)
from kvant.attention.triton.tuning import shape_for
from kvant.kernels.triton.device import arrivals, has_ptx, multiprocessors
from kvant.kv.codecs.rotation import block_length
from kvant.kv.pool import LayerCache

_ROWS = 16
"""Maximum query rows per sequence and KV head: more rows take two launches."""

_MOST_APART = 4
"""Maximum number of programs for the wide rows of one block of rows."""

_WIDE_TILE, _WIDE_STAGES = 16, 3
"""Tokens in a tile of wide rows, and stages of their loop. Tiles of 32 without stages took longer on an H200:
228 us instead of 214 for 64 sequences of 8,192 tokens in int4, all in the programs that read narrow rows."""


def serves(cache: LayerCache, step: Step) -> bool:
    """Whether one launch can read both forms of the layer in this step."""
    g = cache.spec.geometry
    return step.causal and step.max_seqlen_q * (g.num_q_heads // g.num_kv_heads) <= _ROWS


def attend(cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
    """Attends with q [T, num_q_heads, head_dim_k] over both forms.

    Returns [T, num_q_heads, head_dim_v] like q.
    """
    spec, wide_cache, both = cache.spec, cache.wide, cache.spec.wide
    assert spec.k is not None
    assert spec.v is not None
    assert wide_cache is not None
    assert wide_cache.spec.k is not None
    assert wide_cache.spec.v is not None
    assert both is not None
    g, device = spec.geometry, q.device
    tokens, q_heads, head_k = q.shape
    heads, head_v = g.num_kv_heads, g.head_dim_v
    group, num_seqs = q_heads // heads, step.seqlens_kv.shape[0]
    if tokens == 0:
        return q.new_empty(0, q_heads, head_v)
    full = q.dtype is torch.float32
    sms = multiprocessors(device)
    shape = shape_for(
        spec.k.dtype,
        spec.v.dtype,
        (g.head_dim_k, head_v),
        step.max_seqlen_q * group,
        full=full,
        crowd=num_seqs * heads / sms,
        single=step.max_seqlen_q == 1,
    )
    k, v = format_of(spec.k.dtype), format_of(spec.v.dtype)
    wide_k, wide_v = format_of(wide_cache.spec.k.dtype), format_of(wide_cache.spec.v.dtype)
    assert v.rotated or not wide_v.rotated, "wide formats are not rotated"
    cut = cut_step(
        shape,
        tokens=tokens,
        num_seqs=num_seqs,
        max_seqlen_q=step.max_seqlen_q,
        heads=heads,
        group=group,
        multiprocessors=sms,
        rotated=True,
    )
    narrow_q = _prepared(q, rotated=k.rotated)
    alike = k.rotated == wide_k.rotated
    wide_q = narrow_q if alike else _prepared(q, rotated=wide_k.rotated)
    wide_step = step.of(cache.wide_group)
    out = q.new_empty(tokens, q_heads, head_v)
    blocks = num_seqs * heads
    # One for 64 sequences, because it hides behind their narrow rows; more for fewer sequences.
    apart = max(1, min(_MOST_APART, shape.programs * sms // (2 * blocks)))
    programs = cut.items + num_seqs * apart
    partial = q.new_empty((programs, heads, shape.rows, head_v), dtype=torch.float32)
    partial_lse = q.new_empty((programs, heads, shape.rows), dtype=torch.float32)
    options = {} if shape.max_registers is None else {"maxnreg": shape.max_registers}
    both_attention[(heads * programs,)](
        narrow_q, narrow_q.stride(0), narrow_q.stride(1), *words(cache.k, k), *words(cache.v, v),
        shifts(device, k, v, wide_k, wide_v), page_units(cache), cache.k_scale, cache.v_scale,
        step.page_table, step.page_table.stride(0),
        wide_q, wide_q.stride(0), wide_q.stride(1), *words(wide_cache.k, wide_k),
        *words(wide_cache.v, wide_v), page_units(wide_cache),
        wide_step.page_table, wide_step.page_table.stride(0),
        params.sinks, out, partial, partial_lse, step.cu_seqlens_q, step.seqlens_kv,
        listed_items(step, cut, 0, tokens=False) if cut.listed else None,
        num_seqs, arrivals(device, cut.items * heads) if cut.join else None, tokens,
        params.scale, params.softcap, cut.target, cut.least, both.sink, both.recent,
        GROUP=group, HEADS=heads, PAGE=cache.page_size, ROWS=shape.rows, TILE=shape.tile,
        HEAD_K=head_k, HEAD_V=head_v, K=k, PAD_K=pad(head_k, k), V=v, PAD_V=pad(head_v, v),
        K_OUTER=outer(cache.k_scale), V_OUTER=outer(cache.v_scale),
        WIDE_TILE=_WIDE_TILE, WIDE_K=wide_k, WIDE_PAD_K=pad(head_k, wide_k),
        WIDE_V=wide_v, WIDE_PAD_V=pad(head_v, wide_v),
        WIDE_K_OUTER=outer(wide_cache.k_scale), WIDE_V_OUTER=outer(wide_cache.v_scale), APART=apart,
        SOFTCAP=params.softcap > 0, SINKS=params.sinks is not None, FULL=full, LISTED=cut.listed,
        PTX=has_ptx(device), JOIN=cut.join, AT_ONCE=shape.joined_at_once(cut.join),
        EARLY=cut.early, LANES=lanes(num_seqs), WIDE_STAGES=_WIDE_STAGES,
        num_warps=shape.warps, num_stages=shape.stages, **options, **ahead(device),
    )  # fmt: skip
    if not cut.join:
        _combine(
            cut, q_heads, head_v, out, partial, partial_lse, step, params, apart,
            rotated=v.rotated, wide_rotated=wide_v.rotated,
        )  # fmt: skip
    return out


def _combine(
    cut: Cut,
    q_heads: int,
    head_v: int,
    out: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    step: Step,
    params: AttentionParams,
    apart: int,
    *,
    rotated: bool,
    wide_rotated: bool,
) -> None:
    """Joins the parts of both forms into out [T, q_heads, head_v]."""
    per_program = heads_joined_at_once(cut.tokens, q_heads)
    at_once, warps = cut.parts_joined_at_once
    width = triton.next_power_of_2(head_v)
    warps = max(warps, at_once * width // 4096)  # as in the backend: 128 numbers a thread
    combine_both[(q_heads * cut.tokens // per_program,)](
        partial, partial_lse, params.sinks, out, step.cu_seqlens_q, step.seqlens_kv,
        listed_items(step, cut, 0, tokens=True) if cut.listed else None,
        cut.num_seqs, cut.target, cut.least, cut.items, per_program,
        GROUP=cut.group, HEADS=cut.heads, HEAD_V=head_v, PAD=width, ROWS=cut.shape.rows,
        TILE=cut.shape.tile, AT_ONCE=at_once, APART=apart, SINKS=params.sinks is not None,
        LISTED=cut.listed, ROTATED=rotated, WIDE_ROTATED=wide_rotated,
        EARLY=cut.early, LANES=lanes(cut.num_seqs),
        num_warps=warps, **ahead(out.device),
    )  # fmt: skip


def _prepared(q: Tensor, *, rotated: bool) -> Tensor:
    """Returns queries [T, heads, head_dim] as kernels read them, rotated if asked."""
    if rotated:
        return rotate(q, block_length(q.shape[-1]))
    return q if q.stride(-1) == 1 else q.contiguous()
