"""Rank 0's runner: sends each step to the other ranks, then runs its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvant.errors import NotServable, RankLost, WayOut
from kvant.execution.batch import Drafts, Launched, Outcome
from kvant.execution.recorder import Recorder
from kvant.execution.runner import ModelRunner
from kvant.kv.groups import ArenaLayout
from kvant.kv.saturation import Saturated
from kvant.models.loaded import LoadedModel
from kvant.parallel.group import RankGroup
from kvant.parallel.messages import Capture, Counted, CountSaturated, Propose
from kvant.parallel.mirror import Sender, SentAsk, sent_zero
from kvant.parallel.ranks import Ranks
from kvant.parallel.watched import WatchedRecorder
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule
from kvant.speculative.base import Ask


class RankedRunner(ModelRunner):
    """The `ModelRunner` of rank 0. Its methods raise RankLost if another rank died or hangs."""

    def __init__(
        self,
        model: LoadedModel,
        num_pages: int,
        ranks: Ranks,
        group: RankGroup,
        *,
        max_num_seqs: int,
        layout: ArenaLayout | None,
    ) -> None:
        super().__init__(model, num_pages, max_num_seqs=max_num_seqs, layout=layout)
        self.ranks = ranks
        self._group = group
        self._sender = Sender()
        self._zeroed: Sequence[Sequence[int]] = ()

    def _recorder(self) -> Recorder:
        return WatchedRecorder(self.device, self.ranks.check)

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """Clears pages here, and on other ranks with the next step; at once if there is a proposer."""
        if self._proposer is None:
            self._zeroed = pages
        else:
            self.ranks.send_array(sent_zero(pages))
        super().zero(pages)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Proposes drafts. A drafter with a model runs on every rank; rank 0's drafts are used."""
        if not self._taps:
            return super().propose(asks)
        sent = [SentAsk(len(a.token_ids), a.token_ids[-1], a.held, a.num_tokens) for a in asks]
        self.ranks.send(Propose(sent))
        with self._group.together():
            return super().propose(asks)

    def launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None = None) -> Launched:
        sender, has_reader = self._sender, self.is_recorded
        if (whole := sender.table(table, log_has_reader=has_reader)) is not None:
            self.ranks.send(whole)
        zeroed, self._zeroed = self._zeroed, ()
        self.ranks.send_array(
            sender.step(schedule, table, drafts, log_has_reader=has_reader, cleared=zeroed)
        )
        try:
            with self._group.together():
                launched = super().launch(schedule, table, drafts)
        except RankLost:
            raise
        except Exception as fault:
            self.ranks.explain(fault)
            raise
        return Launched(
            schedule, launched.logits, partial(self._read, launched.read), launched.is_final,
            launched.batch,
        )  # fmt: skip

    def _read(self, read: Callable[[], Outcome]) -> Outcome:
        outcome = read()
        self.ranks.check()  # an aborted collective leaves wrong values
        return outcome

    def capture(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_drafts: Sequence[int] = (),
        on_progress: Callable[[str, int, int], None] = lambda task, done, total: None,
    ) -> None:
        self.ranks.send(
            Capture(max_num_seqs, max_num_batched_tokens, max_model_len, tuple(num_drafts))
        )
        with self._group.together():
            super().capture(
                max_num_seqs, max_num_batched_tokens, max_model_len, num_drafts, on_progress
            )

    def count_saturated(self) -> Callable[[], tuple[Saturated, ...]]:
        """Counts are summed over ranks, each of which stores some of the heads."""
        self.ranks.send(CountSaturated())
        read, plan = super().count_saturated(), self.pool.plan

        def summed() -> tuple[Saturated, ...]:
            own = read()
            found = {one.spec.geometry.index: one for one in own if one.role is plan.role}
            for answer in self.ranks.answers():
                assert isinstance(answer, Counted)
                for layer, k, v in answer.saturated:
                    known = found.get(layer, Saturated(plan.role, plan.layers[layer], 0, 0))
                    found[layer] = replace(known, k=known.k + k, v=known.v + v)
            of_draft = (one for one in own if one.role is not plan.role)
            return (*(found[layer] for layer in sorted(found)), *of_draft)

        return summed

    def check(self) -> None:
        self.ranks.check()

    def refit(self, other: LoadedModel) -> None:
        raise NotServable(
            "weights cannot change in an engine of several ranks",
            why="only this process would get them",
            ways_out=(WayOut("start an engine with them"),),
        )
