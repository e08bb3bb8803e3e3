"""One forward: a batch to logits, over the pages of one pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvant.attention.backends import load_backends
from kvant.attention.base import Step, StepCall
from kvant.errors import NotServable
from kvant.execution.batch import Batch
from kvant.execution.batch_graphs import BatchGraphs
from kvant.execution.decodes import Decodes
from kvant.execution.graphs import StepGraphs
from kvant.execution.launched import Answered
from kvant.execution.pieces import Pieces
from kvant.execution.recorder import CudaRecorder, Recorder
from kvant.execution.shared_logits import SharedLogits
from kvant.execution.warm_up import warm_up
from kvant.kv.pool import SCRATCH_PAGE, KVPool
from kvant.kv.saturation import Saturated
from kvant.kv.spec import KVPlan
from kvant.models.loaded import LoadedModel, widened
from kvant.sampling.drawing import to_device
from kvant.speculative.base import DeviceProposer, Proposer


class Runner(Protocol):
    """What the engine's loop needs of a model."""

    @property
    def device(self) -> torch.device: ...

    def zero(self, pages: Sequence[int]) -> None:
        """Clear pages that have a new owner."""
        ...

    def run(self, batch: Batch) -> Tensor:
        """Write the batch's K and V; logits [len(batch.sampled), vocab_size]. Its tensors are on the host."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether it makes use of `Decodes.limits`."""
        ...

    def saturated(self) -> tuple[Saturated, ...]:
        """What layers were given and could not hold, so far. Waits for the device."""
        ...

    def recorded(self, num_sequences: int) -> Sequence[int]:
        """Numbers of drafts that so many answering sequences can have in `run_decodes`, 0 among
        them; empty where steps go through `run`.
        """
        ...

    def run_decodes(self, step: Decodes) -> Tensor:
        """A step of answering sequences that is recorded; `StepGraphs.run`."""
        ...

    def read_decodes(self) -> Answered:
        """What the last of those came to, or of `run_pieces`."""
        ...

    @property
    def finds_tokens(self) -> bool:
        """Whether it has `run_pieces` and `run_behind`."""
        ...

    def run_pieces(self, step: Pieces, following: Decodes | None) -> Tensor:
        """`StepGraphs.run_pieces`."""
        ...

    def run_behind(self, step: Pieces) -> None:
        """`StepGraphs.run_behind`."""
        ...


class ReadFirst:
    """Part of a `Runner` all of whose steps are read before one with a prompt is launched."""

    finds_tokens = False

    def run_pieces(self, step: Pieces, following: Decodes | None) -> Tensor:
        raise AssertionError("every step is read first")

    def run_behind(self, step: Pieces) -> None:
        raise AssertionError("every step is read first")


class ModelRunner:
    """A loaded model over a pool of its plan, or of one that differs from it in formats only."""

    def __init__(self, model: LoadedModel, num_pages: int, plan: KVPlan | None = None) -> None:
        self.model = model
        stored = model.plan if plan is None else plan
        self.pool = KVPool(stored, num_pages, device=model.device, scales=model.scales)
        self._backends = load_backends(stored, batch_invariant=model.batch_invariant)
        self._graphs: StepGraphs | None = None
        self._pieces: BatchGraphs | None = None
        self._proposer: Proposer | None = None
        self._taps: tuple[int, ...] = ()
        self._clear: Callable[[Sequence[int]], None] = self.pool.zero
        if self.device.type != "cpu":
            from kvant.kernels.triton.zero import PageEraser

            self._clear = PageEraser(self.pool.planes()).clear

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def pools(self) -> list[KVPool]:
        """All that page ids mean here: the target's, and the proposer's own if it has one."""
        drafts = getattr(self._proposer, "pool", None)
        return [self.pool] if drafts is None else [self.pool, drafts]

    def teach(self, proposer: Proposer) -> None:
        """From now on it learns every step that is run."""
        self._proposer, self._taps = proposer, proposer.taps

    def refit(self, other: LoadedModel) -> None:
        """Go on with another model's weights and scales; what was launched ahead is forgotten."""
        self.model.refit(other)
        self.pool.refit(self.model.scales)
        if self._graphs is not None:
            self._graphs.forget()

    def zero(self, pages: Sequence[int]) -> None:
        self._clear(pages)

    def run(self, batch: Batch) -> Tensor:
        if self._graphs is not None:
            self._graphs.forget()
        if self._pieces is not None:
            logits = self._pieces.run(batch)
            if logits is not None:
                return logits
        if self.device.type == "cpu":
            logits = self._forward(batch.input_ids, batch.step, batch.logits_index)
        else:
            logits = self._forward(*_there(batch, self.device))
        return logits.to(widened(logits.dtype))

    @property
    def looks_ahead(self) -> bool:
        return self._graphs is not None

    def saturated(self) -> tuple[Saturated, ...]:
        return tuple(one for pool in self.pools for one in pool.saturated())

    def recorded(self, num_sequences: int) -> Sequence[int]:
        return () if self._graphs is None else self._graphs.num_drafts(num_sequences)

    def run_decodes(self, step: Decodes) -> Tensor:
        assert self._graphs is not None
        return self._graphs.run(step)

    def read_decodes(self) -> Answered:
        assert self._graphs is not None
        return self._graphs.read()

    @property
    def finds_tokens(self) -> bool:
        return self._graphs is not None and self._proposer is None

    def run_pieces(self, step: Pieces, following: Decodes | None) -> Tensor:
        assert self._graphs is not None
        return self._graphs.run_pieces(step, following)

    def run_behind(self, step: Pieces) -> None:
        assert self._graphs is not None
        self._graphs.run_behind(step)

    def _compute(self, batch: Batch, newest: Tensor | None, kept: SharedLogits) -> None:
        """`Compute`: recorded where that can be."""
        if self._pieces is not None and self._pieces.run(batch, newest) is not None:
            return
        ids, step, index = _there(batch, self.device)
        if newest is not None:
            ids = torch.cat([newest, ids[len(newest) :]])
        kept.keep(self._forward(ids, step, index))

    def capture(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_drafts: Sequence[int] = (),
    ) -> None:
        """Compile what a GPU needs and record steps as CUDA graphs, so that no request waits.

        num_drafts: of one sequence, in steps that the proposer drafts on the device.
        On a CPU there is nothing to do. NotServable where this model's steps cannot be recorded: they
        run all the same, each launched by Python.
        """
        if self.device.type == "cpu":
            return
        self.zero([SCRATCH_PAGE])  # the first request's pages would wait for the kernel otherwise
        warm_up(
            self.model,
            self.pool,
            self._forward,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
        )
        try:
            self.record(
                CudaRecorder(self.device),
                max_num_seqs,
                max_num_batched_tokens,
                max_model_len,
                num_drafts,
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as fault:
            torch.cuda.synchronize(self.device)
            raise NotServable(
                ("steps" if self._graphs is None else "steps with pieces of prompts")
                + " cannot be recorded as CUDA graphs: they are launched one operation at a time, "
                "which is slower",
                why=str(fault).splitlines()[0],
            ) from None
        torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def record(
        self,
        recorder: Recorder,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_drafts: Sequence[int] = (),
    ) -> None:
        """Record steps, as `capture` does it; from now on they are replayed."""
        draft = self._proposer.draft if isinstance(self._proposer, DeviceProposer) else None
        graphs = StepGraphs(
            self._forward,
            max_num_seqs,
            page_size=self.model.plan.page_size,
            max_model_len=max_model_len,
            device=self.device,
            recorder=recorder,
            draft=draft,
            num_drafts=() if draft is None else num_drafts,
            compute=self._compute if self._proposer is None else None,
        )
        graphs.capture()
        self._graphs = graphs
        # In that mode a launch has room for every item that any of its tokens could have: too many.
        if not self.model.batch_invariant:
            pieces = BatchGraphs(
                self._forward,
                max_num_seqs,
                max_num_batched_tokens,
                page_size=self.model.plan.page_size,
                max_model_len=max_model_len,
                device=self.device,
                recorder=recorder,
                logits=graphs.logits,
            )
            pieces.capture()
            self._pieces = pieces

    def _forward(self, input_ids: Tensor, step: Step, logits_index: Tensor) -> Tensor:
        """Logits as they were computed."""
        call = StepCall(step, self.pool, self._backends)
        logits, hidden = self.model.forward_with_hidden(input_ids, call, logits_index, self._taps)
        if self._proposer is not None and self._taps:
            self._proposer.learn(step, hidden)
        return logits


def _there(batch: Batch, device: torch.device) -> tuple[Tensor, Step, Tensor]:
    """The host does not wait for it."""
    ids, index = to_device(batch.input_ids, device), to_device(batch.logits_index, device)
    return ids, _moved(batch.step, device), index


def _moved(step: Step, device: torch.device) -> Step:
    return replace(
        step,
        cu_seqlens_q=to_device(step.cu_seqlens_q, device),
        seqlens_kv=to_device(step.seqlens_kv, device),
        page_table=to_device(step.page_table, device),
        slot_mapping=to_device(step.slot_mapping, device),
        positions=to_device(step.positions, device),
        rest=None if step.rest is None else _moved(step.rest, device),
        wanted=None if step.wanted is None else _moved(step.wanted, device),
    )
