"""Launches steps of a loaded model over the pages of one pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvant.attention.backends import load_backends
from kvant.attention.base import ShortReader, ShortSteps, Step, StepCall
from kvant.errors import NotServable
from kvant.execution.batch import Batch, Drafts, Launched, build_batch, on_host
from kvant.execution.graphs import Eraser, StepGraphs
from kvant.execution.recorder import CudaRecorder, Recorder
from kvant.execution.warm_up import warm_up
from kvant.kernels.transfer import to_device
from kvant.kv.groups import ArenaLayout
from kvant.kv.pool import SCRATCH_PAGE, Arena, KVPool
from kvant.kv.saturation import Saturated
from kvant.kv.spec import KVPlan
from kvant.kv.state_pool import StatePool
from kvant.models.loaded import LoadedModel, widened
from kvant.plan.graph_sizes import short_piece
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule
from kvant.speculative.base import Ask, DeviceProposer, Proposer


class Runner(Protocol):
    """The operations by which the engine's loop runs a model.

    `ModelRunner` runs it in one process. With several ranks, rank 0 has a `RankedRunner`
    (`kvant.parallel.runner`), and the other ranks have a `FollowingRunner` (`kvant.parallel.watched`).
    """

    @property
    def device(self) -> torch.device: ...

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """Clears reallocated pages before the next step runs. pages: page ids of each group."""
        ...

    def launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None = None) -> Launched:
        """Launches a step. drafts: each sequence's drafts, chosen by the host.

        If `drafts` is None and the schedule has `max_drafts`, the recorded proposer drafts.
        """
        ...

    def num_drafts(self, num_sequences: int) -> Sequence[int]:
        """Returns the numbers of drafts, including 0, for which such steps are recorded, if any are."""
        ...

    def count_saturated(self) -> Callable[[], tuple[Saturated, ...]]:
        """Begins to count each layer's values beyond its format's range so far.

        The result waits for the device; after the next step it waits no longer.
        """
        ...

    def check(self) -> None:
        """Raises RankLost if a process that runs a part of the model was lost."""
        ...


class ModelRunner:
    """A loaded model and the pool of its pages.

    num_pages: superblocks of the arena. plan: the pool's plan if its formats differ from the model's.
    layout: how the arena is divided; None makes a superblock one page of all layers, and gives states an
    arena of their own. max_num_seqs: rows of the row table. draft_states: as in `Limits`. embeds: steps
    return hidden states after the final norm in place of logits.
    """

    def __init__(
        self,
        model: LoadedModel,
        num_pages: int,
        plan: KVPlan | None = None,
        *,
        max_num_seqs: int = 1,
        layout: ArenaLayout | None = None,
        draft_states: int = 0,
        embeds: bool = False,
    ) -> None:
        self.model = model
        self._last = model.last if embeds else None
        stored = model.plan if plan is None else plan
        arena = None if layout is None else Arena(layout, num_pages, model.device)
        self.pool = KVPool(
            stored, arena or num_pages, device=model.device, scales=model.scales_for(stored)
        )
        self.states: StatePool | None = None
        if stored.has_states:
            self.states = StatePool(
                stored, max_num_seqs, model.device, arena,
                num_drafts=draft_states, singly=model.batch_invariant,
            )  # fmt: skip
        self._backends = load_backends(stored, batch_invariant=model.batch_invariant)
        self._graphs: StepGraphs | None = None
        self._proposer: Proposer | None = None
        self._taps: tuple[int, ...] = ()
        self._clear: Callable[[Sequence[Sequence[int]]], None] = self.pool.arena.zero
        self._eraser: Eraser | None = None
        self._to_clear: Sequence[Sequence[int]] = ()
        if self.device.type != "cpu":
            from kvant.kernels.triton.zero import PageEraser

            erased = self.pool.arena
            groups = range(len(erased.layout.of_tokens))
            self._eraser = PageEraser([erased.pieces(group) for group in groups])
            self._clear = self._eraser.clear

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def pools(self) -> list[KVPool]:
        """All pools that page ids address: the target's, and the proposer's if it has one."""
        drafts = getattr(self._proposer, "pool", None)
        return [self.pool] if drafts is None else [self.pool, drafts]

    def teach(self, proposer: Proposer) -> None:
        """Passes the hidden states of every later step to `proposer`, at the layers it asks for."""
        self._proposer, self._taps = proposer, proposer.taps

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Calls `Proposer.propose` of the proposer given to `teach`."""
        assert self._proposer is not None
        return self._proposer.propose(asks)

    def refit(self, other: LoadedModel) -> None:
        """Replaces the weights and scales by those of another model, in place."""
        self.model.refit(other)
        self.pool.refit(self.model.scales)

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        if self._clears_in_steps:
            self._to_clear = pages
        else:
            self._clear(pages)

    @property
    def _clears_in_steps(self) -> bool:
        """True if the next step clears the pages itself. A proposer might write to them before that step."""
        return self._graphs is not None and self._eraser is not None and self._proposer is None

    def num_drafts(self, num_sequences: int) -> Sequence[int]:
        return () if self._graphs is None else self._graphs.num_drafts(num_sequences)

    @property
    def is_recorded(self) -> bool:
        """True if steps are recorded, so that a step can be launched before the host reads the last one."""
        return self._graphs is not None

    def launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None = None) -> Launched:
        if self.states is None:
            return self._launch(schedule, table, drafts)
        self.states.accept(schedule.states_to_accept)
        self.states.place(
            [row for row, _ in schedule.states_to_place],
            [page for _, page in schedule.states_to_place],
        )
        self.states.copy(schedule.states_to_load)
        launched = self._launch(schedule, table, drafts)
        self.states.copy(schedule.states_to_keep)
        return launched

    def _launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None) -> Launched:
        if self._graphs is not None:
            cleared, self._to_clear = self._to_clear, ()
            return self._graphs.launch(schedule, table, drafts, cleared)
        batch = build_batch(schedule, table, self.model.plan.page_size, drafts)
        return on_host(schedule, batch, drafts, self.run(batch))

    def run(self, batch: Batch) -> Tensor:
        """Runs a batch without pending tokens, and writes its K and V to the pool.

        Returns logits [len(batch.logits_index), vocab_size], or hidden states, in float32 or wider.
        """
        logits = self._run(batch, to_device(batch.input_ids, self.device))
        return logits.to(widened(logits.dtype))

    def _run(self, batch: Batch, input_ids: Tensor) -> Tensor:
        """Runs a batch. input_ids: [T] int64 on the device. Returns logits in the compute dtype."""
        if self.device.type == "cpu":
            return self._forward(input_ids, batch.step, batch.logits_index)
        index = to_device(batch.logits_index, self.device)
        return self._forward(input_ids, _moved(batch.step, self.device), index)

    def count_saturated(self) -> Callable[[], tuple[Saturated, ...]]:
        counted = [pool.count_saturated() for pool in self.pools]
        return lambda: tuple(one for read in counted for one in read())

    def check(self) -> None:
        """Does nothing: the whole model runs in this process."""

    def capture(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_drafts: Sequence[int] = (),
        on_progress: Callable[[str, int, int], None] = lambda task, done, total: None,
    ) -> None:
        """Compiles GPU kernels and records steps as CUDA graphs, so that no request waits for either.

        num_drafts: numbers of drafts per sequence to record, for a proposer that drafts on the device.
        on_progress: called with the task, the number of parts done, and of all parts. On a CPU this does
        nothing. Raises NotServable if this model's steps cannot be recorded; they still run, each operation
        launched by Python.
        """
        if self.device.type == "cpu":
            return
        self.zero([[SCRATCH_PAGE]])  # the first request's pages would wait for the kernel otherwise
        group = self.model.group
        # Several threads of each rank would reach the collectives in different orders.
        with nullcontext() if group is None else group.alone():
            warm_up(
                self.model,
                self.pool,
                self._forward,
                max_num_seqs,
                max_num_batched_tokens,
                max_model_len,
                partial(on_progress, "compiling kernels"),
            )
        if (
            self._last is not None
        ):  # an engine that embeds runs prompts only; the host reads their rows
            return
        try:
            self.record(
                self._recorder(),
                max_num_seqs,
                max_num_batched_tokens,
                max_model_len,
                num_drafts,
                partial(on_progress, "recording steps"),
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as fault:
            torch.cuda.synchronize(self.device)
            raise NotServable(
                "steps cannot be recorded as CUDA graphs: they are launched one operation at a time, "
                "which is slower",
                why=str(fault).splitlines()[0],
            ) from None
        torch.cuda.synchronize(self.device)

    def _recorder(self) -> Recorder:
        return CudaRecorder(self.device)

    @torch.no_grad()
    def record(
        self,
        recorder: Recorder,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_drafts: Sequence[int] = (),
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Records steps for `capture`. From then on `launch` replays them where one fits."""
        draft = self._proposer.draft if isinstance(self._proposer, DeviceProposer) else None
        graphs = StepGraphs(
            self._forward,
            max_num_seqs,
            # No mixed graphs if batch-invariant: their launches would need room for far too many work items.
            # None with recurrent states either: these need prompts' ends, which only the host knows.
            max_num_batched_tokens=0
            if self.model.batch_invariant or self.states is not None
            else max_num_batched_tokens,
            page_size=self.model.plan.page_size,
            num_groups=len(self.pool.arena.layout.of_tokens),
            max_model_len=max_model_len,
            device=self.device,
            recorder=recorder,
            run=self._run,
            draft=draft,
            num_drafts=() if draft is None else num_drafts,
            eraser=self._eraser if self._proposer is None else None,
            short_piece=short_piece(layer.geometry for layer in self.model.plan.layers),
            short=self._short_steps(),
        )
        graphs.capture(on_progress)
        self._graphs = graphs

    def _short_steps(self) -> ShortSteps | None:
        """Returns the short decode steps for which most layers have a kernel of their own, if any."""
        plan = self.pool.plan
        compute = getattr(torch, plan.compute_dtype.value)
        found = Counter[ShortSteps | None]()
        for layer in plan.layers:
            place = layer.geometry.index
            backend = self._backends[place]
            if layer.k is not None and isinstance(backend, ShortReader):
                found[backend.short_steps(self.pool[place], compute)] += 1
        return found.most_common(1)[0][0] if found else None

    def _forward(self, input_ids: Tensor, step: Step, logits_index: Tensor) -> Tensor:
        """Returns logits [m, vocab_size] in the compute dtype, or hidden states of an engine that embeds."""
        call = StepCall(step, self.pool, self._backends, self.states)
        if self._last is not None:
            layer, norm = self._last
            _, (output,) = self.model.forward_with_hidden(input_ids, call, logits_index, (layer,))
            found: Tensor = norm(output[logits_index])
            return found
        logits, hidden = self.model.forward_with_hidden(input_ids, call, logits_index, self._taps)
        if self._proposer is not None and self._taps:
            self._proposer.learn(step, hidden)
        return logits


def _moved(step: Step, device: torch.device) -> Step:
    """Returns a copy of the step on `device`, without waiting for the copies."""
    moved = replace(
        step,
        cu_seqlens_q=to_device(step.cu_seqlens_q, device),
        seqlens_kv=to_device(step.seqlens_kv, device),
        page_table=to_device(step.page_table, device),
        slot_mapping=to_device(step.slot_mapping, device),
        positions=to_device(step.positions, device),
        rows=None if step.rows is None else to_device(step.rows, device),
        rest=None if step.rest is None else _moved(step.rest, device),
        wanted=None if step.wanted is None else _moved(step.wanted, device),
    )
    others = tuple(
        replace(
            moved,
            page_table=to_device(other.page_table, device),
            slot_mapping=to_device(other.slot_mapping, device),
            rest=None if other.rest is None else _moved(other.rest, device),
        )
        for other in step.others
    )
    return replace(moved, others=others) if others else moved
