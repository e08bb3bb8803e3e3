"""What a forward offers: one way to run the packed steps of a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from kvant.attention.base import StepCall


class Forward(Protocol):
    """Runs steps of one model. Mutates nothing but the pool and memory of its own."""

    @property
    def extra_bytes(self) -> int:
        """Bytes that it holds beside the module's parameters and buffers."""
        ...

    @property
    def compiled_seconds(self) -> float | None:
        """Seconds spent in compiled code so far; None if a step is not one call of compiled code."""
        ...

    def run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one step; return logits and the outputs of some decoder layers.

        input_ids: [T] int64, the packed tokens of `call.step`. logits_index: [n] int64, rows of T.
        layers: indices of decoder layers. Returns logits [n, vocab_size], and [T, hidden_size] in
        the model's dtype for each of `layers`. Writes the step's keys and values into the pool.
        """
        ...

    def score(self, hidden: Tensor) -> Tensor:
        """Apply the head: [n, hidden_size], normed, in the model's dtype -> [n, vocab_size]."""
        ...


def apply_head(module: nn.Module, hidden: Tensor) -> Tensor:
    """Apply a transformers model's own head: [n, hidden_size] -> [n, vocab_size]."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    assert head is not None, "a model that generates has a head"
    found: Tensor = head(hidden)
    return found
