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

    def keep(self, logits: Tensor) -> Tensor:
        """Copies logits [n, vocab_size] to the buffer's first rows. Returns these, in float32 or wider."""
        if self._memory is None:
            self._memory = torch.empty_like(logits, dtype=widened(logits.dtype))
        rows = self._memory[: len(logits)]
        return rows if rows.data_ptr() == logits.data_ptr() else rows.copy_(logits)

    def rows(self, count: int) -> Tensor:
        """Returns the buffer's first rows, [count, vocab_size]."""
        assert self._memory is not None
        return self._memory[:count]
