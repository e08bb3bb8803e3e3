"""Steps of answering sequences as recorded graphs: one launch replays a whole step.

A graph is recorded for a number of sequences, and for a number of drafts that each may have; a step of
fewer is padded with rows that have no stored tokens and write nowhere. With drafts the graph holds all
of it: the drafter fills its blocks, the target verifies them, the drafter learns what the target ran,
and each sequence's newest token and its place are found. Nothing is read by the host meanwhile: a few
numbers of each sequence go in, tokens come out.

While nothing is asked of tokens but to be the likeliest or to be drawn, the next step is known before its
tokens are: the same sequences, from where this one ends. Tokens are drawn on the device, by numbers that
the host knows in advance; the next step is launched at once and reads tokens and places where the
step before left them on the device, so the device does not wait while the host deals with results. If
the next step turns out to be another one, what was launched is forgotten: it wrote behind the ends of
its sequences, where whoever comes next writes again.

Steps with pieces of prompts are launched here as well, wherever they are computed: behind another one
their answering sequences' tokens are taken from there, and what their logits come to is found in the
same way, so that any step can follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.attention.base import Step
from kvant.execution.batch import Batch
from kvant.execution.decodes import Decodes
from kvant.execution.launched import Answered, Guess, Launched, Recorded
from kvant.execution.layout import lay_out, what_follows
from kvant.execution.pieces import Pieces
from kvant.execution.recorder import Recorder
from kvant.execution.shared_logits import SharedLogits
from kvant.plan.graph_sizes import batch_sizes, draft_sizes
from kvant.sampling.drawing import Drawer, DrawParts, has_kernels, parts_for

Forward = Callable[[Tensor, Step, Tensor], Tensor]
"""input_ids [T], step, logits_index [n] -> logits [n, vocab_size] as computed, in any dtype."""

Draft = Callable[[Tensor, Step], Tensor]
"""As `DeviceProposer.draft`."""

Compute = Callable[[Batch, Tensor | None, SharedLogits], None]
"""Run a batch and leave its logits there. The tensor: the batch's first ids, on the device."""

_Step = TypeVar("_Step", Decodes, Pieces)

_FEW = 128
"""Rows of logits that are looked at where a step with pieces of prompts has no more."""


class _Staging:
    """Memory for one step's numbers and results. Rows of numbers: ids, starts, ends, sources. draws:
    `Draw.numbers`.

    found: as the graph's, one piece: what is copied from the device must lie in one piece on the host
    too, else the copy goes through memory that makes the host wait for it.
    """

    def __init__(self, recorder: Recorder, most: int, most_rows: int, max_pages: int) -> None:
        self.numbers = recorder.host_buffer(4, most, dtype=torch.int64)
        self.table = recorder.host_buffer(most * max_pages, dtype=torch.int32)
        self.draws = recorder.host_buffer(most, 5, dtype=torch.float64)
        self.found = recorder.host_buffer(3 * (most_rows + most), dtype=torch.int64)
        self.done = recorder.mark()


class StepGraphs:
    """Graphs for up to `most` sequences whose page table has `max_pages` columns.

    draft: the proposer's, for steps of so many drafts as `num_drafts` names. compute: runs steps with
    pieces of prompts, for `run_pieces`.
    """

    def __init__(
        self,
        forward: Forward,
        most: int,
        *,
        page_size: int,
        max_model_len: int,
        device: torch.device,
        recorder: Recorder,
        draft: Draft | None = None,
        num_drafts: Sequence[int] = (),
        compute: Compute | None = None,
    ) -> None:
        assert draft is not None or not num_drafts
        self._forward = forward
        self._draft = draft
        self._page_size = page_size
        self._max_model_len = max_model_len
        self._recorder = recorder
        self._sizes = {k: draft_sizes(k, most) for k in sorted(num_drafts, reverse=True)}
        self._sizes[0] = batch_sizes(most)
        self._sizes = {k: sizes for k, sizes in self._sizes.items() if sizes}
        most_rows = max((1 + k) * sizes[-1] for k, sizes in self._sizes.items())
        max_pages = -(-max_model_len // page_size)
        self._inputs = torch.zeros(4, most, dtype=torch.int64, device=device)
        self._table = torch.zeros(most, max_pages, dtype=torch.int32, device=device)
        self._draws = torch.zeros(most, 5, dtype=torch.float64, device=device)
        self._drawer: Drawer | None = None
        self.logits = SharedLogits()
        # Three, as two steps can be on their way while the numbers of a third are written.
        self._staging = [_Staging(recorder, most, most_rows, max_pages) for _ in range(3)]
        self._turn = 0
        self._rows = torch.arange(most_rows, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, int], Recorded] = {}
        self._compute = compute
        self._finders: dict[int, Recorded] = {}
        self._guess: Guess | None = None
        self._current: tuple[Launched, NDArray[np.int64]] | None = None

    def capture(self) -> None:
        """Record every graph. Nothing is written to the pool: every row is padding meanwhile."""
        wanted = [(size, k) for k, sizes in self._sizes.items() for size in sizes]
        for size, k in sorted(wanted, key=lambda one: -one[0] * (1 + one[1])):
            self._graphs[size, k] = self._record(partial(self._run, size, k), size, draws=not k)
        most = self._sizes[0][-1]
        for size in {min(_FEW, most), most} if self._compute is not None else ():
            self._finders[size] = self._record(partial(self._find, size), size, draws=True)

    def _record(
        self, run: Callable[[], tuple[Tensor, Tensor]], size: int, *, draws: bool
    ) -> Recorded:
        """run: gives logits and what `Recorded` has found, of `size` sequences."""
        replay, (logits, found) = self._recorder.record(run)
        newest = found[-3 * size :].view(3, size)
        chosen = found[2 * size : 3 * size]
        draw = self._record_draw(logits, chosen, newest[0]) if draws else None
        return Recorded(replay, logits, found, newest, draw)

    def num_drafts(self, num_sequences: int) -> list[int]:
        """Numbers of drafts that so many sequences can have in a recorded step; empty for none."""
        return [k for k, sizes in self._sizes.items() if num_sequences <= sizes[-1]]

    def forget(self) -> None:
        """Another step comes between: what was launched for the next one is not what it will be."""
        self._guess = self._current = None

    def run(self, step: Decodes) -> Tensor:
        """Launch a step, or find that it has been launched; `read` tells what it came to.

        Logits [T, vocab_size], valid until the next step. If the step has `limits`, what follows it is
        launched too, and the width of the logits is 0: they are already being overwritten.
        """
        launched = self._begin(step, Guess.places_of, self._launch)
        logits = launched.graph.logits
        if step.limits is None:
            return logits
        self._follow(step)
        return logits[:, :0]

    def run_pieces(self, step: Pieces, following: Decodes | None) -> Tensor:
        """As `run`, of a step with pieces of prompts. Logits of width 0.

        following: by its `limits`, the step of all its sequences that is launched behind it.
        """
        launched = self._begin(step, Guess.rows_of, self._launch_pieces)
        if following is not None:
            self._follow(following)
        return launched.graph.logits[:, :0]

    def run_behind(self, step: Pieces) -> None:
        """Launch what follows the last run: there its first chunks' tokens are found."""
        assert self._current is not None
        before = self._current[0]
        sources = before.rows_of(step.numbers[: step.num_unknown])
        self._guess = Guess(self._launch_pieces(step, (before, sources)), before, sources)

    def _begin(
        self,
        step: _Step,
        find: Callable[[Guess, _Step], NDArray[np.int64] | None],
        launch: Callable[[_Step, None], Launched],
    ) -> Launched:
        """What was launched already, if `find` says where the step's sequences stand there; else launch."""
        guess, self._guess = self._guess, None
        places = None if guess is None else find(guess, step)
        if guess is None or places is None:
            self._current = launch(step, None), np.arange(len(step.numbers))
        else:
            self._current = guess.launched, places
        return self._current[0]

    def _follow(self, step: Decodes) -> None:
        """Launch what follows the last run, by its `limits`."""
        assert self._current is not None
        self._guess = Guess(self._launch(step, self._current), *self._current)

    def read(self) -> Answered:
        """Of the last run. Waits for it, not for what was launched behind it."""
        assert self._current is not None
        launched, places = self._current
        return launched.answered(places)

    def _launch(self, step: Decodes, after: tuple[Launched, NDArray[np.int64]] | None) -> Launched:
        """Replay a graph for a step; or, with `after`, for what follows it if nothing ends or arrives.

        after: the step as it was launched, and where its sequences stand there, to go on from.
        """
        ends = step.ends if after is None else step.limits
        assert ends is not None
        count = len(step.numbers)
        size = next(size for size in self._sizes[step.num_drafts] if size >= count)
        staging = self._next_staging()
        host = staging.numbers.numpy()
        host[:, :size] = 0
        host[2, :count] = ends
        if after is None:
            host[0, :count] = step.ids
            host[1, :count] = step.starts
        else:
            host[3, :count] = after[1]
        pages = step.table.shape[1]
        table = staging.table[: count * pages].view(count, pages)
        table.numpy()[:] = step.table
        self._inputs.copy_(staging.numbers, non_blocking=True)
        self._table[:count, :pages].copy_(table, non_blocking=True)
        if after is not None:
            # What lies beyond `count` here ends at 0, so it is padding wherever it starts.
            before = after[0].graph.next[:2]
            self._inputs[:2, :size].copy_(before.index_select(1, self._inputs[3, :size]))
        graph = self._graphs[size, step.num_drafts]
        graph.replay()
        if step.draws is not None:  # random numbers are made while the model runs
            self._draw(graph, staging.draws[:size], step.draws.numbers(int(after is not None)))
        results, following = self._send(staging, graph)
        return Launched(
            step.numbers, step.num_drafts, ends, graph, results, following, staging.done
        )

    def _launch_pieces(
        self, step: Pieces, after: tuple[Launched, NDArray[np.int64]] | None
    ) -> Launched:
        """after: where the tokens of the first chunks are found, if they are not known."""
        assert self._compute is not None
        count = len(step.numbers)
        size = next(size for size in sorted(self._finders) if size >= count)
        staging = self._next_staging()
        host = staging.numbers.numpy()
        host[:, :size] = 0
        host[1, :count] = step.starts
        if after is not None:
            host[3, : len(after[1])] = after[1]
        self._inputs.copy_(staging.numbers, non_blocking=True)
        newest = None
        if after is not None:
            newest = after[0].graph.next[0].index_select(0, self._inputs[3, : len(after[1])])
        self._compute(step.batch(), newest, self.logits)
        finder = self._finders[size]
        finder.replay()
        draws = step.draws()
        if draws is not None:
            self._draw(finder, staging.draws[:size], draws.numbers(0))
        results, following = self._send(staging, finder)
        ends = step.starts + 1
        return Launched(
            step.numbers, 0, ends, finder, results, following, staging.done, step.chunks
        )

    def _next_staging(self) -> _Staging:
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]
        staging.done.synchronize()
        return staging

    def _send(self, staging: _Staging, graph: Recorded) -> tuple[Tensor, Tensor]:
        """What was found to the host: `results` and `next` of `Launched`."""
        size = graph.next.shape[1]
        found = staging.found[: graph.found.shape[0]]
        found.copy_(graph.found, non_blocking=True)
        staging.done.record()
        return found[: -3 * size].view(3, -1), found[-3 * size :].view(3, size)

    def _record_draw(self, logits: Tensor, chosen: Tensor, newest: Tensor) -> DrawParts:
        """Drawing from the logits of a step, each of whose rows has the token `chosen`; `newest` too."""
        size, record = len(chosen), self._recorder.record
        # What is recorded runs once before: nothing has been found yet, and tokens are places in a row.
        chosen.zero_()
        if self._drawer is None:  # the largest step comes first
            self._drawer = Drawer(size, logits.shape[1], logits.device)
        parts = self._drawer.parts(logits, self._rows[:size], self._draws[:size], chosen)

        def drawn(run: Callable[[], None]) -> Callable[[], None]:
            def both() -> None:
                run()
                newest.copy_(chosen)

            return record(both)[0]

        return DrawParts(
            drawn(parts.few), record(parts.by_count)[0], record(parts.by_share)[0],
            drawn(parts.choose),
        )  # fmt: skip

    def _draw(self, graph: Recorded, staging: Tensor, draws: NDArray[np.float64]) -> None:
        """Launch what finds a step's tokens behind the step. Padding has no temperature."""
        assert graph.draw is not None, "drafts are verified by the likeliest tokens"
        staging.zero_()
        staging.numpy()[: len(draws)] = draws
        self._draws[: len(staging)].copy_(staging, non_blocking=True)
        for launch in graph.draw.of(parts_for(staging[: len(draws)])):
            launch()

    def _run(self, size: int, num_drafts: int) -> tuple[Tensor, Tensor]:
        """What is recorded: logits, and what `Recorded` has found."""
        ids, starts, ends = self._inputs[:3, :size]
        if not num_drafts and has_kernels(ids.device):
            from kvant.execution.triton_step import likeliest, plain_step

            step = plain_step(
                starts, ends, self._table[:size], self._page_size, self._max_model_len
            )
            logits = self.logits.keep(self._forward(ids, step, self._rows[:size]))
            return logits, likeliest(logits, ids, starts)
        layout = lay_out(
            starts, ends, self._table[:size], num_drafts, self._page_size, self._max_model_len
        )
        tokens = ids
        if num_drafts:
            assert self._draft is not None
            tokens = torch.where(layout.is_first, ids[layout.owners], -1)
            tokens = torch.where(layout.is_first, tokens, self._draft(tokens, layout.step))
        rows = self._rows[: tokens.shape[0]]
        logits = self.logits.keep(self._forward(tokens, layout.step, rows))
        best, chosen = logits.max(dim=-1)  # NaN and +Inf anywhere in a row become its maximum
        newest, places = what_follows(layout, starts, tokens, chosen)
        sound = torch.isfinite(best).to(torch.int64)
        return logits, torch.cat([tokens, sound, chosen, newest, places, layout.counts])

    def _find(self, size: int) -> tuple[Tensor, Tensor]:
        """What is recorded: rows of the shared logits, and what `Recorded` has found, of them."""
        logits, (ids, starts) = self.logits.rows(size), self._inputs[:2, :size]
        if has_kernels(ids.device):
            from kvant.execution.triton_step import likeliest

            return logits, likeliest(logits, ids, starts)
        best, chosen = logits.max(dim=-1)
        sound = torch.isfinite(best).to(torch.int64)
        found = torch.cat([ids, sound, chosen, chosen, starts + 1, torch.ones_like(ids)])
        return logits, found
