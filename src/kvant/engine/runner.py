"""One forward: a batch to logits, over the pages of one pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvant.attention.backends import load_backends
from kvant.attention.base import Step, StepCall
from kvant.engine.batch import Batch
from kvant.engine.graphs import DecodeGraphs
from kvant.engine.sampler import Greedy, greedy
from kvant.engine.warm_up import warm_up
from kvant.kv.pool import KVPool
from kvant.kv.saturation import Saturated
from kvant.kv.spec import KVPlan
from kvant.models.loaded import LoadedModel


class Runner(Protocol):
    """What the engine's loop needs of a model."""

    @property
    def device(self) -> torch.device: ...

    def zero(self, pages: Sequence[int]) -> None:
        """Clear pages that have a new owner."""
        ...

    def run(self, batch: Batch) -> Tensor:
        """Write the batch's K and V; logits [len(batch.sampled), vocab_size], valid until the next run.

        The batch's tensors are on the host.
        """
        ...

    def run_with_hidden(
        self, batch: Batch, layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`run`, and what these decoder layers hand on: [T, hidden_size] each."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether it makes use of `Batch.ahead`."""
        ...

    def saturated(self) -> tuple[Saturated, ...]:
        """What layers were given and could not hold, so far. Waits for the device."""
        ...

    def greedy(self, logits: Tensor) -> Greedy:
        """What `run` just returned, or rather its rows' largest entries."""
        ...


class ModelRunner:
    """A loaded model over a pool of its plan, or of one that differs from it in formats only."""

    def __init__(self, model: LoadedModel, num_pages: int, plan: KVPlan | None = None) -> None:
        self.model = model
        stored = model.plan if plan is None else plan
        self.pool = KVPool(stored, num_pages, device=model.device, scales=model.scales)
        self._backends = load_backends(stored, batch_invariant=model.batch_invariant)
        self._graphs: DecodeGraphs | None = None
        self._by_graph = False
        self._clear: Callable[[Sequence[int]], None] = self.pool.zero
        if self.device.type != "cpu":
            from kvant.attention.triton.zero import PageEraser

            self._clear = PageEraser(self.pool.planes()).clear

    @property
    def device(self) -> torch.device:
        return self.model.device

    def zero(self, pages: Sequence[int]) -> None:
        self._clear(pages)

    def run(self, batch: Batch) -> Tensor:
        graphs = self._graphs
        self._by_graph = False
        if graphs is not None:
            if graphs.holds(batch.step) and len(batch.sampled) == batch.input_ids.shape[0]:
                self._by_graph = True
                return graphs.run(batch, [sequence.number for sequence in batch.sampled])
            graphs.forget()
        if self.device.type == "cpu":
            return self._forward(batch.input_ids, batch.step, batch.logits_index)
        return self._forward(*_there(batch, self.device))

    def run_with_hidden(
        self, batch: Batch, layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        self._by_graph = False
        if self._graphs is not None:
            self._graphs.forget()
        input_ids, step, logits_index = _there(batch, self.device)
        call = StepCall(step, self.pool, self._backends)
        return self.model.forward_with_hidden(input_ids, call, logits_index, layers)

    @property
    def looks_ahead(self) -> bool:
        return self._graphs is not None

    def saturated(self) -> tuple[Saturated, ...]:
        return self.pool.saturated()

    def greedy(self, logits: Tensor) -> Greedy:
        if self._by_graph:
            assert self._graphs is not None
            return self._graphs.greedy()
        return greedy(logits)

    def capture(
        self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> str | None:
        """Compile what a GPU needs and record decode steps as CUDA graphs, so that no request waits.

        On a CPU there is nothing to do. A line for the user where the model cannot be recorded.
        """
        if self.device.type == "cpu":
            return None
        warm_up(self.model, self.pool, self._forward, max_num_batched_tokens, max_model_len)
        pages = -(-max_model_len // self.model.plan.page_size)
        graphs = DecodeGraphs(self._forward, max_num_seqs, pages, max_model_len, self.device)
        try:
            graphs.capture()
        except RuntimeError as fault:
            torch.cuda.synchronize(self.device)
            return f"decode steps run without CUDA graphs, slower: {str(fault).splitlines()[0]}"
        self._graphs = graphs
        return None

    def _forward(self, input_ids: Tensor, step: Step, logits_index: Tensor) -> Tensor:
        return self.model.forward(
            input_ids, StepCall(step, self.pool, self._backends), logits_index
        )


def _there(batch: Batch, device: torch.device) -> tuple[Tensor, Step, Tensor]:
    return batch.input_ids.to(device), _moved(batch.step, device), batch.logits_index.to(device)


def _moved(step: Step, device: torch.device) -> Step:
    return replace(
        step,
        cu_seqlens_q=step.cu_seqlens_q.to(device),
        seqlens_kv=step.seqlens_kv.to(device),
        page_table=step.page_table.to(device),
        slot_mapping=step.slot_mapping.to(device),
        positions=step.positions.to(device),
        rest=None if step.rest is None else _moved(step.rest, device),
    )
