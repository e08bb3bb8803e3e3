"""One buffer for the logits of all graphs, since each step overwrites the logits of the one before."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.models.loaded import widened


class SharedLogits:
    """A buffer that the first step with logits allocates. That step is the largest and is not recorded, so
    no graph owns the memory.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def room(self, logits: Tensor) -> Tensor:
        """Returns the buffer's first rows, as many as logits [n, vocab_size] has, in float32 or wider."""
        if self._memory is None:
            self._memory = torch.empty_like(logits, dtype=widened(logits.dtype))
        return self._memory[: len(logits)]

    def keep(self, logits: Tensor) -> Tensor:
        """Copies logits [n, vocab_size] to the buffer's first rows. Returns these, in float32 or wider."""
        rows = self.room(logits)
        return rows if rows.data_ptr() == logits.data_ptr() else rows.copy_(logits)

    def rows(self, count: int) -> Tensor:
        """Returns the buffer's first rows, [count, vocab_size]."""
        assert self._memory is not None
        return self._memory[:count]
