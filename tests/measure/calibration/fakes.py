"""A backend that does nothing, and what it is called with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.kv.pool import LayerCache


class Nothing:
    name = "nothing"

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None: ...

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        return q


def cache_of(heads: int, head_dim: int) -> Any:
    geometry = SimpleNamespace(index=0, num_kv_heads=heads, head_dim_k=head_dim)
    return SimpleNamespace(spec=SimpleNamespace(geometry=geometry))


def step_of(tokens: int) -> Step:
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    none = torch.zeros(1, 1, dtype=torch.int32)
    place = torch.arange(tokens)
    return Step(ends, ends[1:], none, place, place, tokens, tokens)
