"""Cross-entropy over the drafted positions, weighted by what each is worth to the accepted length.

The weights are D-PACE's (arXiv 2605.18810): with q_i the drafter's probability of the right token
at position i, smoothed to q~_i = (1 - alpha) q_i + alpha, position j weighs sum over m >= j of
prod over i <= m of q~_i. For alpha = 0 the weighted gradient is that of the expected accepted
length; alpha > 0 keeps later positions learning while the first are still poor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class BlockLoss(NamedTuple):
    """A weighted mean loss (differentiable) and how the blocks fared."""

    loss: Tensor  # [] float32
    hits: Tensor  # [N, K] bool: the right token was the drafter's first choice


def position_weights(cross_entropy: Tensor, exists: Tensor, alpha: float) -> Tensor:
    """D-PACE weights [N, K] for cross-entropies [N, K]; positions that do not exist weigh 0."""
    smoothed = (1 - alpha) * torch.exp(-cross_entropy) + alpha
    prefix = torch.where(exists, smoothed, 1.0).cumprod(dim=1) * exists
    return prefix.flip(1).cumsum(dim=1).flip(1) * exists


def chunk_gradient(
    hidden: Tensor, head: Tensor, labels: Tensor, exists: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss sum, weight sum, hits [N, K] and d(loss sum)/d(hidden), of states [N, K, H]."""
    # One flat product: as a batch of small ones it runs many times slower.
    wide = torch.mm(hidden.flatten(0, 1), head.t()).float().view(*labels.shape, -1)
    top = wide.amax(-1)
    log_sum = torch.log(torch.exp(wide - top[..., None]).sum(-1)) + top
    right = wide.gather(-1, labels[..., None])[..., 0]
    cross_entropy = log_sum - right
    weight = position_weights(cross_entropy, exists, alpha)
    is_label = torch.arange(head.shape[0], device=head.device) == labels[..., None]
    slope = (torch.exp(wide - log_sum[..., None]) - is_label.float()) * weight[..., None]
    gradient = torch.mm(slope.to(head.dtype).flatten(0, 1), head).view_as(hidden)
    return (weight * cross_entropy).sum(), weight.sum(), (right >= top) & exists, gradient


class FrozenHeadLoss(torch.autograd.Function):
    """Loss through a frozen lm_head, chunk by chunk: logits for all blocks never exist at once.

    The head is not trained, so the gradient of the hidden states can be made in the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        exists: Tensor,
        alpha: float,
        chunk: int,
        gradient_of_chunk: Any,
    ) -> tuple[Tensor, Tensor]:
        losses, weights, hits, gradients = [], [], [], []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            out = gradient_of_chunk(hidden[part], head, labels[part], exists[part], alpha)
            losses.append(out[0])
            weights.append(out[1])
            hits.append(out[2])
            gradients.append(out[3])
        total = torch.stack(weights).sum().clamp(min=1e-6)
        ctx.save_for_backward(torch.cat(gradients), total)
        all_hits = torch.cat(hits)
        ctx.mark_non_differentiable(all_hits)
        return torch.stack(losses).sum() / total, all_hits

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, total = ctx.saved_tensors
        scaled = gradient * (upstream[0] / total).to(gradient.dtype)
        return scaled, None, None, None, None, None, None


def block_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    exists: Tensor,
    alpha: float,
    chunk: int = 1024,
    gradient_of_chunk: Any = chunk_gradient,
) -> BlockLoss:
    """Loss of drafted states ``hidden`` [N, K, H] against ``labels`` [N, K].

    ``head`` [V, H] is the target's lm_head in the dtype to compute in; ``gradient_of_chunk`` may be
    a compiled ``chunk_gradient``.
    """
    loss, hits = FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden.to(head.dtype).contiguous(), head, labels, exists, alpha, chunk, gradient_of_chunk
    )
    return BlockLoss(loss, hits)


def accepted(hits: Tensor) -> Tensor:
    """How many drafts of each block are accepted: the leading run of hits. [..., K] -> [...]"""
    return hits.long().cumprod(dim=-1).sum(-1)
