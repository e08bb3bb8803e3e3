"""Attention whose keys and values of all heads come from one stored latent of a token (MLA).

    row that is stored     latent c [L] and rotary key r [R], one for all heads
    key of a head          (K c, r), K [nope, L] the head's part of the weight that expands latents
    value of a head        V c, V [v, L] its other part

Only the row is stored. So a head's query is projected to the latents (DeepSeek-V2, arXiv:2405.04434,
section 2.1): q . K c = (K^T q) . c, and the sum of V c by probabilities is V times the sum of c. One stored
head then serves all query heads, and the first L numbers of a row are its value. For long runs of queries
the backend may expand the stored rows instead: a key and a value per head cost less there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.attention.base import AttentionBackend, ExpandingBackend, Step
from kvant.kv.pool import LayerCache
from kvant.models.fused.kernels import Kernels
from kvant.models.fused.layers import LatentLayer, Model
from kvant.models.fused.linear import Linear, Multiply
from kvant.models.invariant.linear import TiledLinear

Plain = Callable[[Tensor, Linear], Tensor]
"""Multiplies a step's rows: x [T, columns], linear -> [T, rows]."""

PerHead = Callable[[Tensor, Tensor, Tensor], None]
"""Multiplies x [T, heads, in] by weight [heads, in, out] per head, into out [T, heads, out]."""


def enter(
    x: Tensor, layer: LatentLayer, cos: Tensor, sin: Tensor, kernels: Kernels, plain: Plain
) -> tuple[Tensor, Tensor]:
    """Projects x [T, hidden_size] to queries [T, num_q_heads, nope + R] and rows to store [T, L + R].

    cos, sin: [T, R / 2]. Both results are rotated, and the latents normalised.
    """
    both = plain(x, layer.entry)
    width = layer.expanding.shape[2] + layer.rotary_width
    q, row = both[:, :-width], both[:, -width:]
    if layer.q_up is not None:
        assert layer.q_norm is not None
        q = plain(kernels.norm(q.contiguous(), layer.q_norm), layer.q_up)
    q = q.reshape(len(q), layer.num_q_heads, -1)
    return kernels.rotate_latent(q, row, layer.kv_norm, cos, sin, layer.pairing)


def attend(
    q: Tensor,
    layer: LatentLayer,
    backend: AttentionBackend,
    cache: LayerCache,
    step: Step,
    per_head: PerHead,
) -> Tensor:
    """Attends over stored rows: q [n, num_q_heads, nope + R] -> [n, num_q_heads * v]."""
    out = q.new_empty(*q.shape[:2], layer.values.shape[2])
    if step.long and isinstance(backend, ExpandingBackend) and backend.expands(q):
        first = step.long[0].first_token
        if step.rest is not None:
            _attend_absorbed(q[:first], out[:first], layer, backend, cache, step.rest, per_head)
        backend.attend_expanded(cache, q, out, step, layer.params, partial(expand, layer=layer))
    else:
        _attend_absorbed(q, out, layer, backend, cache, step, per_head)
    return out.flatten(1)


def _attend_absorbed(
    q: Tensor,
    out: Tensor,
    layer: LatentLayer,
    backend: AttentionBackend,
    cache: LayerCache,
    step: Step,
    per_head: PerHead,
) -> None:
    """Writes results to out [n, num_q_heads, v]: queries are projected to the latents."""
    rank = layer.keys.shape[2]
    absorbed = q.new_empty(*q.shape[:2], rank + layer.rotary_width)
    per_head(q[..., : layer.nope], layer.keys, absorbed[..., :rank])
    absorbed[..., rank:] = q[..., layer.nope :]
    per_head(backend.attend(cache, absorbed, step, layer.params), layer.values, out)


def expand(rows: Tensor, *, layer: LatentLayer) -> tuple[Tensor, Tensor]:
    """Expands stored rows [m, L + R] to keys [m, num_q_heads, nope + R] and values [m, num_q_heads, v]."""
    heads, width, rank = layer.expanding.shape
    both = F.linear(rows[:, :rank], layer.expanding.flatten(0, 1)).view(-1, heads, width)
    turned = rows[:, None, rank:].expand(-1, heads, -1)
    return torch.cat([both[..., : layer.nope], turned], -1), both[..., layer.nope :]


def per_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes x [T, heads, in] times weight [heads, in, out] to out [T, heads, out], in one product."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


def prove(tiled: TiledLinear, model: Model) -> None:
    """Proves tiles for the products of single heads. Raises NotServable like `TiledLinear.prove`."""
    for layer in model.layers:
        if isinstance(layer, LatentLayer):
            for weight in (layer.keys, layer.values):
                for one in weight.unbind(0):
                    tiled.prove(one.T)


def each_head_by(multiply: Multiply) -> PerHead:
    """Returns a `PerHead` that calls `multiply` once per head, for a batch-invariant `multiply`."""

    def apart(x: Tensor, weight: Tensor, out: Tensor) -> None:
        for head, one in enumerate(weight.unbind(0)):
            out[:, head] = multiply(x[:, head], one.T, None)

    return apart
