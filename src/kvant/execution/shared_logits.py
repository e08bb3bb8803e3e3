"""Where steps leave their logits: one piece of memory for all graphs, as the next step overwrites it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.models.loaded import widened


class SharedLogits:
    """Allocated by the first step that keeps logits, which is the largest and not recorded: no graph
    owns the memory.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def keep(self, logits: Tensor) -> Tensor:
        """Copy logits [n, vocab_size] to the first rows. Returns these, in float32 or wider."""
        if self._memory is None:
            self._memory = torch.empty_like(logits, dtype=widened(logits.dtype))
        rows = self._memory[: len(logits)]
        return rows if rows.data_ptr() == logits.data_ptr() else rows.copy_(logits)

    def rows(self, count: int) -> Tensor:
        """The first rows [count, vocab_size]."""
        assert self._memory is not None
        return self._memory[:count]
