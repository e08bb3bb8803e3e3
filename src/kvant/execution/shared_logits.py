"""Where recorded steps leave their logits: one piece of memory for all, as the next step overwrites them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.models.loaded import widened


class SharedLogits:
    """Made by the first step that is kept, which is the largest, before anything is recorded: no graph
    owns it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def keep(self, logits: Tensor) -> Tensor:
        """The same numbers [n, vocab_size] in float32 or wider, where those of every step lie."""
        if self._memory is None:
            self._memory = torch.empty_like(logits, dtype=widened(logits.dtype))
        return self._memory[: len(logits)].copy_(logits)

    def rows(self, count: int) -> Tensor:
        """The first rows, whatever lies there."""
        assert self._memory is not None
        return self._memory[:count]
