"""One forward: a batch to logits, over the pages of one pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvant.attention.backends import load_backends
from kvant.attention.base import StepCall
from kvant.engine.batch import Batch
from kvant.kv.pool import KVPool
from kvant.models.loaded import LoadedModel


class Runner(Protocol):
    """What the engine's loop needs of a model."""

    @property
    def device(self) -> torch.device: ...

    def zero(self, pages: Sequence[int]) -> None:
        """Clear pages that have a new owner."""
        ...

    def run(self, batch: Batch) -> Tensor:
        """Write the batch's K and V; logits [len(batch.sampled), vocab_size]."""
        ...


class ModelRunner:
    """A loaded model over a pool of its plan."""

    def __init__(self, model: LoadedModel, num_pages: int) -> None:
        self.model = model
        self.pool = KVPool(model.plan, num_pages, device=model.device, scales=model.scales)
        self._backends = load_backends(model.plan)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def zero(self, pages: Sequence[int]) -> None:
        self.pool.zero(pages)

    def run(self, batch: Batch) -> Tensor:
        call = StepCall(batch.step, self.pool, self._backends)
        return self.model.forward(batch.input_ids, call, batch.logits_index)
