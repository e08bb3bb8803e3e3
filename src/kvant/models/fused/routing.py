"""How a token chooses its experts: the family's parameters, and the choice in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

_TINY = 1e-20
"""Sigmoid routers add this to the sum that they divide by."""


class Scoring(Enum):
    """How logits become weights of the chosen experts."""

    SOFTMAX_THEN_TOP_K = "softmax, then top-k"
    TOP_K_THEN_SOFTMAX = "top-k, then softmax"
    SIGMOID = "sigmoid, then top-k of groups and experts"


@dataclass(frozen=True, slots=True)
class Routing:
    """The router of a layer of experts.

    top_k: experts per token. renormalise: the weights of the chosen experts are divided by their sum.
    rounded: the weights are rounded to the dtype of the tokens; float32 otherwise. wide: logits are
    computed in float32. scale: multiplies the weights. groups, top_groups: experts are chosen inside the
    top_groups best of `groups` groups, scored by the sum of a group's `counted` best scores.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX_THEN_TOP_K
    renormalise: bool = True
    rounded: bool = False
    wide: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    counted: int = 2

    def __post_init__(self) -> None:
        assert 0 < self.top_k <= self.num_experts
        assert self.num_experts % self.groups == 0
        assert self.top_k <= self.num_experts // self.groups * self.top_groups

    @property
    def chooses_by_logits(self) -> bool:
        """Whether the largest logits choose the experts, and a softmax, perhaps scaled, gives weights."""
        return self.scoring is not Scoring.SIGMOID and self.groups == self.top_groups

    @property
    def is_softmax(self) -> bool:
        """Whether weights are an unscaled softmax of logits in the tokens' dtype."""
        return self.chooses_by_logits and not self.wide and self.scale == 1.0


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the weights and the ids (int64) of every token's experts, both [T, top_k].

    logits: [T, num_experts]. correction: [num_experts], added to the scores that choose experts, not to
    weights. Operations and dtypes are those of transformers' routers. With `wide`, weights are float32.
    """
    if routing.scoring is Scoring.TOP_K_THEN_SOFTMAX:
        chosen, ids = torch.topk(logits, routing.top_k, dim=-1)
        return torch.softmax(chosen, dim=-1, dtype=logits.dtype), ids
    if routing.scoring is Scoring.SIGMOID:
        scores = torch.sigmoid(logits.to(torch.float32))
    else:
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if correction is None and routing.groups == 1:
        weights, ids = torch.topk(scores, routing.top_k, dim=-1)
    else:
        choice = scores if correction is None else scores + correction
        ids = torch.topk(_of_best_groups(choice, routing), routing.top_k, dim=-1)[1]
        weights = scores.gather(1, ids)
    if routing.renormalise:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + _TINY if routing.scoring is Scoring.SIGMOID else total)
    weights = weights * routing.scale if routing.scale != 1.0 else weights
    return weights.to(logits.dtype) if routing.rounded and not routing.wide else weights, ids


def _of_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Sets choice [T, num_experts] to minus infinity outside a token's best groups; returns a copy."""
    if routing.groups == routing.top_groups:
        return choice
    by_group = choice.view(-1, routing.groups, routing.num_experts // routing.groups)
    best = by_group.topk(routing.counted, dim=-1)[0].sum(-1).topk(routing.top_groups, dim=-1)[1]
    inside = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~inside[..., None], float("-inf")).view_as(choice)
