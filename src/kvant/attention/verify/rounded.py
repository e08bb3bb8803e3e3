"""The definition of attention with requested rounding: queries and probabilities of `Step.long` in e4m3.

A number is rounded to the four significant bits of e4m3, ties to even, in units of a power of two that puts
the largest of its row into (128, 256]. A query's row is over head_dim, a row of probabilities over keys.
Powers of two do not change significant bits. So the order of keys only affects how numbers below 2^-14 of
the largest are rounded, which e4m3 holds with fewer bits. The softmax sum is not rounded: it adds the
probabilities before rounding.

If values have a scale per token and head, the scale is rounded together with the probability.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.verify import definition
from kvant.kv.format import ScalePlace
from kvant.kv.pool import LayerCache

_FRACTION_BITS = 3
_SMALLEST_NORMAL = -6
_LARGEST = 8
"""Exponent of two to which the largest number of a row is scaled; its upper bound is 2^8."""

_LOST = 2.0**-11
"""Maximum error of a score, relative to the sum of its products' sizes: Hopper's tensor cores align products
with the largest and truncate the rest. On an H200, sums of 64 and 128 products erred by at most 2^-11.3 of
that (2^-16.4 on average), with torch's products as well as Kvant's."""


def attend(
    cache: LayerCache, q: Tensor, step: Step, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Computes `definition.attend`; also returns how far rows may differ: float64 [T, num_q_heads], lengths.

    q: [T, num_q_heads, head_dim]. A probability near a tie may round either way, because the tensor cores'
    scores have errors. The allowance is its possible contribution; squares are summed, since its values may
    point in any direction.
    """
    assert params.sinks is None, "refuse() excludes sinks"
    g = cache.spec.geometry
    out = torch.zeros(len(q), g.num_q_heads, g.head_dim_v, dtype=torch.float64, device=q.device)
    undecided = out.new_zeros(out.shape[:2])
    if not step.long:
        return definition.attend(cache, q, step, params), undecided
    if step.rest is not None:
        count = step.long[0].first_token
        out[:count] = definition.attend(cache, q[:count], step.rest, params)
    for one in step.long:
        rows = slice(one.first_token, one.first_token + one.num_tokens)
        queries = four_bits(q[rows].double())
        seen = definition.see(cache, queries, step, params, one.sequence, one.length)
        factors = _factors(cache, seen.slots)
        largest = seen.scores.amax(-1, keepdim=True)
        # A whole power of two, so that the rounded bits are those of exp(score).
        shift = torch.ceil(largest / _LN2) * _LN2
        p = torch.exp(seen.scores - shift)
        total = p.sum(-1, keepdim=True)
        weights = p * factors
        unit = _unit(weights)
        out[rows] = torch.einsum(
            "hnm,mhd->nhd", _nearest(weights / unit) * unit / factors / total, seen.v
        )
        sizes = torch.einsum("nhd,mhd->hnm", queries.abs(), seen.k.abs())
        by = torch.expm1(_LOST * params.scale * sizes)
        low, high = (_nearest(weights / unit * (1 + some)) for some in (-by, by))
        steps = (high - low) * unit / factors / total
        lengths = torch.linalg.vector_norm(seen.v, dim=-1)
        undecided[rows] = torch.einsum("hnm,mh->nh", steps.square(), lengths.square()).sqrt()
    return out, undecided


_LN2 = 0.6931471805599453


def four_bits(x: Tensor) -> Tensor:
    """Rounds x, float64 [.., n], each row in its own unit; returns the same shape."""
    unit = _unit(x)
    return _nearest(x / unit) * unit


def _unit(x: Tensor) -> Tensor:
    """Returns per row, [.., 1], the power of two that puts its largest number into (128, 256].

    1 for zeros.
    """
    largest = x.abs().amax(-1, keepdim=True)
    fraction, exponent = torch.frexp(largest)  # fraction in [0.5, 1)
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)
    return torch.where(largest == 0, 1.0, torch.exp2(exponent.double() - _LARGEST))


def _nearest(x: Tensor) -> Tensor:
    """Rounds float64 numbers up to 256 to the nearest e4m3 number, ties to even."""
    exponent = torch.frexp(x)[1].double() - 1
    step = torch.exp2(exponent.clamp(min=_SMALLEST_NORMAL) - _FRACTION_BITS)
    return torch.round(x / step) * step


def _factors(cache: LayerCache, slots: Tensor) -> Tensor:
    """Returns [num_q_heads, 1, len(slots)]: the part of a value's scale rounded with its probability."""
    g = cache.spec.geometry
    assert cache.spec.v is not None
    if cache.spec.v.dtype.format.scale_place is not ScalePlace.PLANE:
        return torch.ones(1, 1, 1, dtype=torch.float64, device=slots.device)
    stored = cache.v[1][slots // cache.page_size, slots % cache.page_size]
    scales = stored.view(-1, g.num_kv_heads).double().T[:, None]
    return scales.repeat_interleave(g.num_q_heads // g.num_kv_heads, 0)
