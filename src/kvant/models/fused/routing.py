"""How a token chooses its experts: facts of a family, and the choice in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Scoring(Enum):
    """Which of the two comes first."""

    SOFTMAX_THEN_TOP_K = "softmax, then top-k"
    TOP_K_THEN_SOFTMAX = "top-k, then softmax"


@dataclass(frozen=True, slots=True)
class Routing:
    """The router of a layer of experts.

    top_k: experts of a token. renormalise: the weights of the chosen experts are divided by their sum.
    rounded: the weights are rounded to the dtype of the logits; float32 otherwise.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX_THEN_TOP_K
    renormalise: bool = True
    rounded: bool = False

    def __post_init__(self) -> None:
        assert 0 < self.top_k <= self.num_experts


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the weights and the ids (int64) of every token's experts, both [T, top_k].

    logits: [T, num_experts]. Operations and dtypes are those of transformers' routers.
    """
    if routing.scoring is Scoring.TOP_K_THEN_SOFTMAX:
        chosen, ids = torch.topk(logits, routing.top_k, dim=-1)
        return torch.softmax(chosen, dim=-1, dtype=logits.dtype), ids
    scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weights, ids = torch.topk(scores, routing.top_k, dim=-1)
    if routing.renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype) if routing.rounded else weights, ids
