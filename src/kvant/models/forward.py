"""The interface of a forward, which is one way to run the packed steps of a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from kvant.attention.base import StepCall


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """Bytes of all weights of one layer's experts, which are equally large. A token uses `top_k` of them."""

    num_experts: int
    top_k: int
    bytes: int

    def unread(self, num_tokens: int) -> float:
        """Returns the bytes that a step of `num_tokens` does not read.

        It is the expected number if all experts are equally likely.
        """
        return self.bytes * (1 - self.top_k / self.num_experts) ** num_tokens


class Forward(Protocol):
    """Runs steps of one model. Mutates only the pool and its own memory."""

    @property
    def extra_bytes(self) -> int:
        """Bytes of its own tensors, without the module's parameters and buffers."""
        ...

    @property
    def own_weight_bytes(self) -> int:
        """Bytes among `extra_bytes` that are weights of products."""
        ...

    @property
    def expert_bytes(self) -> tuple[ExpertBytes, ...]:
        """The experts of each layer that has some, in any storage."""
        ...

    @property
    def compiled_seconds(self) -> float | None:
        """Seconds spent in compiled code so far; None if a step is not one call of compiled code."""
        ...

    def run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Runs one step; returns logits and the outputs of some decoder layers.

        input_ids: [T] int64, the packed tokens of `call.step`. logits_index: [n] int64, rows of T.
        layers: indices of decoder layers. Returns logits [n, vocab_size], and [T, hidden_size] in
        the model's dtype for each of `layers`. Writes the step's keys and values into the pool.
        """
        ...

    def score(self, hidden: Tensor) -> Tensor:
        """Applies the head: [n, hidden_size], normed, in the model's dtype -> [n, vocab_size]."""
        ...


def apply_head(module: nn.Module, hidden: Tensor) -> Tensor:
    """Applies a transformers model's own head: [n, hidden_size] -> [n, vocab_size]."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    assert head is not None, "a model that generates has a head"
    found: Tensor = head(hidden)
    return found
