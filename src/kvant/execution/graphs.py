"""Records steps as CUDA graphs, so that one launch replays a whole step.

Three kinds of graphs are recorded, each for several sizes. A smaller step is padded with rows that store
nothing and attend to nothing.

    decodes   n sequences with one token each, and up to k drafts: the drafter fills its blocks, the
              target verifies them, and the drafter reads the target's hidden states
    mixed     T tokens of n sequences, including pieces of prompts
    choosers  choose tokens from the logits of any step that was not a recorded decode

Every step reads its sequences' newest tokens, positions and page ids from the device's rows and writes its
new tokens there. So the next step can be launched before the host has read this one. The host sends row
numbers, and reads tokens when it commits the step.

Mixed graphs use the backend's kernel for paged attention only, since a graph cannot know which sequences
have many queries. Long pieces behind long contexts are faster without a graph and run that way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.attention.base import ShortSteps, Step, with_groups
from kvant.attention.need import LONG
from kvant.execution.batch import (
    Batch,
    Drafts,
    Launched,
    Outcome,
    build_batch,
    newest_tokens,
    on_host,
)
from kvant.execution.device_state import DeviceState
from kvant.execution.recorder import Recorder
from kvant.execution.shared_logits import SharedLogits
from kvant.kernels.listed_pages import listed
from kvant.kernels.transfer import to_device
from kvant.models.loaded import widened
from kvant.plan.graph_sizes import PieceSize, batch_sizes, draft_sizes, piece_sizes
from kvant.sampling.sampler import Drawer, DrawParts, has_kernels, parts_for, uniforms
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule

Forward = Callable[[Tensor, Step, Tensor], Tensor]
"""Maps input_ids [T], a step and logits_index [m] to logits [m, vocab_size] in the compute dtype."""

Draft = Callable[[Tensor, Step], Tensor]
"""`DeviceProposer.draft`."""


class Eraser(Protocol):
    """Clears pages on the device; see `kvant.kernels.triton.zero.PageEraser`."""

    def clear(self, pages: Sequence[Sequence[int]]) -> None: ...

    def clear_listed(self, entries: Tensor) -> None:
        """Clears pages. entries: [n] int64, as `kvant.kernels.listed_pages.listed` returns them."""
        ...


MOST_CONTEXT = 8192
"""The longest context, in tokens, of a long piece in a mixed graph. Longer ones run faster eagerly."""

MOST_READ = 1 << 17
"""The most tokens in the contexts of all long pieces in a mixed graph. More run faster eagerly."""

_NO_LIMIT = 1 << 40

_FEW = 128
"""Rows of the smaller of the two recorded choosers."""

_INPUTS = 9
_ROWS, _TOKENS, _STARTS, _COUNTS, _LIMITS, _KEPT, _INDEX, _VALUES, _CLEARED = range(_INPUTS)
"""Row indices of a step's host inputs. _KEPT: 1 if a row's logits are read after the step. _INDEX, _VALUES:
changed page ids. _CLEARED: pages to clear."""

_MOST_CLEARED = 64
"""The most pages that a recorded step clears. More pages are cleared by a separate launch."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step. found: int64, its results on the device, laid out as `_read` or `_read_drafts` says.

    draw: recorded launches that replace the most likely tokens by sampled ones; None with drafts.
    """

    replay: Callable[[], None]
    logits: Tensor
    found: Tensor
    draw: DrawParts | None


class _Staging:
    """Pinned host memory for one step: inputs that go to the device, and results that come back.

    done: marks that the device has read the inputs and written the results.
    """

    def __init__(self, recorder: Recorder, seqs: int, rows: int, mixed: int) -> None:
        self.numbers = recorder.host_buffer(_INPUTS, seqs, dtype=torch.int64)
        self.mixed = recorder.host_buffer(mixed, dtype=torch.int64)
        self.u = recorder.host_buffer(seqs, dtype=torch.float64)
        # Contiguous like the graph's results: a copy into strided memory would make the host wait.
        self.found = recorder.host_buffer(3 * rows + seqs, dtype=torch.int64)
        self.done = recorder.mark()


class StepGraphs:
    """Records and replays the graphs of steps with up to `most_seqs` sequences.

    forward: the model. max_num_batched_tokens: the most tokens of a mixed graph; 0 records none. draft: the
    proposer's `draft`. num_drafts: the numbers of drafts to record decodes for. run: computes the logits
    [rows, vocab_size] of a batch without a graph, from the batch and its ids [T] int64 on the device.
    eraser: clears pages in `launch`. short_piece: see `kvant.plan.graph_sizes.short_piece`. short: decodes
    that are recorded a second time, because attention is faster if it knows that contexts are short.
    """

    def __init__(
        self,
        forward: Forward,
        most_seqs: int,
        *,
        max_num_batched_tokens: int,
        page_size: int,
        max_model_len: int,
        num_groups: int = 1,
        device: torch.device,
        recorder: Recorder,
        run: Callable[[Batch, Tensor], Tensor],
        draft: Draft | None = None,
        num_drafts: Sequence[int] = (),
        eraser: Eraser | None = None,
        short_piece: int = 0,
        short: ShortSteps | None = None,
    ) -> None:
        assert draft is not None or not num_drafts
        self._eraser = eraser
        self._forward, self._draft, self._eager = forward, draft, run
        self._page_size, self._max_model_len = page_size, max_model_len
        self._recorder = recorder
        self._sizes = {k: draft_sizes(k, most_seqs) for k in sorted(num_drafts, reverse=True)}
        self._sizes[0] = batch_sizes(most_seqs)
        self._sizes = {k: sizes for k, sizes in self._sizes.items() if sizes}
        self._short = short
        most_rows = max((1 + k) * sizes[-1] for k, sizes in self._sizes.items())
        max_pages = -(-max_model_len // page_size)
        self.state = DeviceState(most_seqs, max_pages, device, num_groups)
        self.logits = SharedLogits()
        self._numbers = torch.zeros(_INPUTS, most_seqs, dtype=torch.int64, device=device)
        shape = num_groups, most_seqs, max_pages
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._draws = torch.zeros(most_seqs, 5, dtype=torch.float64, device=device)
        self._u = torch.zeros(most_seqs, dtype=torch.float64, device=device)
        self._places = torch.arange(most_rows, dtype=torch.int64, device=device)
        self._drawer: Drawer | None = None
        self._mixed = None
        if max_num_batched_tokens:
            sizes = piece_sizes(most_seqs, max_num_batched_tokens, short_piece)
            self._mixed = MixedGraphs(self, sizes, device)
        room = 0 if self._mixed is None else self._mixed.room
        # Two: one step may be in flight while the next one is written.
        self._staging = [_Staging(recorder, most_seqs, most_rows, room) for _ in range(2)]
        self._turn = 0
        self._decodes: dict[tuple[int, int, int], _Graph] = {}
        self._choosers: dict[int, _Graph] = {}

    def capture(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Records every graph, the largest first. All rows are padding meanwhile, so nothing is stored.

        on_progress: called with the number of recorded graphs and the number of all graphs.
        """
        self._numbers[_ROWS] = self.state.padding_row
        self._numbers[_INDEX] = -1
        wanted = [
            (size, k, longest)
            for k, sizes in self._sizes.items()
            for size in sizes
            for longest in self._longest(size, k)
        ]
        most = self._sizes[0][-1]
        choosers = {min(_FEW, most), most}
        total = len(wanted) + len(choosers) + (0 if self._mixed is None else self._mixed.num_sizes)
        done = count(1)
        for size, k, longest in sorted(wanted, key=lambda one: -one[0] * (1 + one[1])):
            run = partial(self._run_decodes, size, k, longest)
            self._decodes[size, k, longest] = self._record(run, size, draws=not k)
            on_progress(next(done), total)
        for size in choosers:
            self._choosers[size] = self._record(partial(self._choose, size), size, draws=True)
            on_progress(next(done), total)
        if self._mixed is not None:
            self._mixed.capture(self._recorder, lambda: on_progress(next(done), total))

    def _longest(self, size: int, k: int) -> list[int]:
        """Returns the longest contexts for which decodes are recorded, ascending."""
        short = self._short
        if k or short is None or size > short.seqs or short.tokens >= self._max_model_len:
            return [self._max_model_len]
        return [short.tokens, self._max_model_len]

    def num_drafts(self, num_sequences: int) -> list[int]:
        """Returns the numbers of drafts for which decodes of `num_sequences` sequences are recorded."""
        return [k for k, sizes in self._sizes.items() if num_sequences <= sizes[-1]]

    def launch(
        self,
        schedule: Schedule,
        table: RowTable,
        drafts: Drafts | None,
        cleared: Sequence[Sequence[int]] = (),
    ) -> Launched:
        """Launches a step without waiting for it, and decides whether a graph is replayed.

        drafts: drafts that the host chose; None lets the recorded drafter choose them. cleared: pages of each
        group that are cleared first.
        """
        index, values = self.state.changes(table)
        has_drafts = schedule.max_drafts is not None and self._draft is not None
        k = schedule.num_drafts if has_drafts else 0
        if (
            drafts is None
            and not schedule.num_prefills
            and k in self.num_drafts(len(schedule.rows))
        ):
            return self._launch_decodes(schedule, table, k, index, values, cleared)
        if any(cleared):
            assert self._eraser is not None
            self._eraser.clear(cleared)
        self.state.write(index, values)
        return self._launch_batch(schedule, table, drafts)

    # -- launching -----------------------------------------------------------------------------

    def _launch_decodes(
        self, schedule: Schedule, table: RowTable, k: int,
        index: NDArray[np.int64], values: NDArray[np.int64],
        cleared: Sequence[Sequence[int]],
    ) -> Launched:  # fmt: skip
        count = len(schedule.rows)
        size = next(size for size in self._sizes[k] if size >= count)
        if sum(map(len, cleared)) > min(size, _MOST_CLEARED):
            assert self._eraser is not None
            self._eraser.clear(cleared)
            cleared = ()
        if len(index) > size:
            self.state.write(index, values)
            index = index[:0]
        staging = self._next_staging()
        host = self._clear(staging, size)
        host[_ROWS, :count] = schedule.rows
        host[_TOKENS, :count] = newest_tokens(schedule)
        host[_STARTS, :count] = schedule.starts
        if schedule.limits is not None:
            inexact = schedule.limits >= 0
            host[_STARTS, :count][inexact] = -1
            host[_LIMITS, :count][inexact] = schedule.limits[inexact]
        host[_COUNTS, :count] = schedule.counts
        if k and schedule.max_drafts is not None:
            host[_COUNTS, :count] += schedule.max_drafts
        host[_KEPT, :count] = schedule.needs_host or ~table.is_greedy[schedule.rows]
        host[_INDEX, : len(index)] = index
        host[_VALUES, : len(index)] = values[: len(index)]
        if pages := listed(cleared):
            host[_CLEARED, : len(pages)] = pages
        self._numbers.copy_(staging.numbers, non_blocking=True)
        longest = self._max_model_len
        if schedule.limits is None:
            stored = int(schedule.starts.max()) + 1
            longest = next(most for most in self._longest(size, k) if stored <= most)
        graph = self._decodes[size, k, longest]
        graph.replay()
        if k:  # with rules or sampling, the host decides which drafts are accepted
            is_greedy = bool(table.is_greedy[schedule.rows].all())
            is_final = is_greedy and not schedule.needs_host
            found = self._send(staging, graph)
            read = partial(_read_drafts, staging, found, count, size, is_final)
            return Launched(schedule, graph.logits, read, is_final)
        places = schedule.starts + 1
        return self._chosen(
            schedule, table, graph, staging, schedule.rows, places, list(range(count))
        )

    def _launch_batch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None) -> Launched:
        """Launches a step that the host laid out. The device chooses its tokens.

        The host chooses them if the step has drafts, prompt tokens to score, or more rows than any chooser.
        """
        batch = build_batch(schedule, table, self._page_size, drafts)
        sampling = np.flatnonzero(schedule.samples)
        staging = self._next_staging()
        if self._mixed is not None and self._mixed.run(batch, schedule, staging):
            logits = self.logits.rows(len(batch.logits_index))
        else:
            logits = self._eager(batch, self._resolved_ids(batch, schedule))
        if drafts is not None or batch.scored or len(sampling) > self._sizes[0][-1]:
            return on_host(schedule, batch, drafts, logits.to(widened(logits.dtype)))
        self.logits.keep(logits)
        count = len(sampling)
        size = next(size for size in sorted(self._choosers) if size >= count)
        rows = schedule.rows[sampling]
        last = (schedule.starts + schedule.counts)[sampling] - 1
        host = self._clear(staging, size)
        host[_ROWS, :count] = rows
        host[_STARTS, :count] = last
        host[_COUNTS, :count] = 1
        self._numbers.copy_(staging.numbers, non_blocking=True)
        graph = self._choosers[size]
        graph.replay()
        return self._chosen(
            schedule, table, graph, staging, rows, last + 1, batch.first_rows, batch
        )

    def _chosen(
        self, schedule: Schedule, table: RowTable, graph: _Graph, staging: _Staging,
        rows: NDArray[np.int64], places: NDArray[np.int64], first_rows: list[int],
        batch: Batch | None = None,
    ) -> Launched:  # fmt: skip
        """Returns a replayed step in which each of `rows` gets one token. places: [n] int64, its position."""
        is_final = not schedule.needs_host
        if is_final:
            self._draw(graph, staging, table, rows, places)
        found = self._send(staging, graph)
        read = partial(_read, staging, found, len(rows), first_rows, is_final)
        return Launched(schedule, graph.logits, read, is_final, batch)

    def _clear(self, staging: _Staging, size: int) -> NDArray[np.int64]:
        """Returns the staging inputs [_INPUTS, most_seqs]; their first `size` columns become padding."""
        host: NDArray[np.int64] = staging.numbers.numpy()
        host[:, :size] = 0
        host[_ROWS, :size] = self.state.padding_row
        host[_LIMITS, :size] = _NO_LIMIT
        host[_INDEX, :size] = -1
        return host

    def _resolved_ids(self, batch: Batch, schedule: Schedule) -> Tensor:
        """Returns the batch's ids on the device, filled in with the tokens of the step in flight."""
        device = self.state.device
        ids = to_device(batch.input_ids, device)
        count = schedule.num_decodes
        if not schedule.is_pending[:count].any():
            return ids
        rows = to_device(torch.from_numpy(schedule.rows[:count]), device)
        newest = self.state.tokens.index_select(0, rows)
        head = torch.where(ids[:count] < 0, newest, ids[:count])
        return torch.cat([head, ids[count:]])

    def _next_staging(self) -> _Staging:
        self._turn = 1 - self._turn
        staging = self._staging[self._turn]
        staging.done.synchronize()
        return staging

    def _send(self, staging: _Staging, graph: _Graph) -> Tensor:
        """Queues the copy of the graph's results to the host. Returns the host tensor that receives them."""
        found = staging.found[: graph.found.shape[0]]
        found.copy_(graph.found, non_blocking=True)
        staging.done.record()
        return found

    def _draw(
        self, graph: _Graph, staging: _Staging, table: RowTable,
        rows: NDArray[np.int64], places: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Replaces the most likely tokens of sampling rows. places: [n] int64, the new tokens' positions."""
        drawn = np.flatnonzero(~table.is_greedy[rows])
        if not len(drawn):
            return
        assert graph.draw is not None, "drafts are verified by the most likely tokens"
        size = len(graph.found) // 2
        u = staging.u.numpy()
        u[:size] = 0
        owners = rows[drawn]
        in_answer = places[drawn] - table.num_prompt[owners]
        u[drawn] = uniforms(table.seeds[owners].tolist(), in_answer.tolist())
        self._u[:size].copy_(staging.u[:size], non_blocking=True)
        self._draws[:size, :4] = self.state.sampling.index_select(0, self._numbers[_ROWS, :size])
        self._draws[:size, 4] = self._u[:size]
        for launch in graph.draw.of(parts_for(torch.from_numpy(table.sampling[rows]))):
            launch()

    # -- recording -----------------------------------------------------------------------------

    def _record(
        self, run: Callable[[], tuple[Tensor, Tensor]], size: int, *, draws: bool
    ) -> _Graph:
        """Records `run`, which returns the logits and the results of `size` sequences."""
        replay, (logits, found) = self._recorder.record(run)
        draw = self._record_draw(logits, found[size : 2 * size]) if draws else None
        return _Graph(replay, logits, found, draw)

    def _record_draw(self, logits: Tensor, chosen: Tensor) -> DrawParts:
        """Records sampling from a step's logits, which overwrites the tokens `chosen`, [n] int64."""
        size, record = len(chosen), self._recorder.record
        # The recorder runs each function once before it records: the tokens must be valid indices then.
        chosen.zero_()
        if self._drawer is None:  # the largest step comes first
            self._drawer = Drawer(size, logits.shape[1], logits.device)
        parts = self._drawer.parts(logits, self._places[:size], self._draws[:size], chosen)
        rows = self._numbers[_ROWS, :size]

        def drawn(run: Callable[[], None]) -> Callable[[], None]:
            def both() -> None:
                run()
                self.state.tokens.index_copy_(0, rows, chosen)

            return record(both)[0]

        return DrawParts(
            drawn(parts.few), record(parts.by_count)[0], record(parts.by_share)[0],
            drawn(parts.choose),
        )  # fmt: skip

    def _run_decodes(self, size: int, k: int, longest: int) -> tuple[Tensor, Tensor]:
        """The recorded decode step of `size` sequences with one token and up to k drafts each.

        longest: tokens of a sequence in the cache, at most.
        """
        state, tables = self.state, self._tables[:, :size]
        inputs = self._numbers[:, :size]
        rows, tokens, starts, counts, limits, wanted, index, values, cleared = inputs
        if self._eraser is not None:
            self._eraser.clear_listed(cleared[:_MOST_CLEARED])
        if has_kernels(state.device):
            from kvant.execution.triton_step import most_likely, plain_step, write_pages

            write_pages(state, index, values)
            if not k:
                ids, step = plain_step(
                    rows, tokens, starts, counts, limits, state, tables, self._page_size, longest,
                )  # fmt: skip
                logits = self._forward(ids, step, self._places[:size])
                kept = self.logits.room(logits)
                return kept, most_likely(
                    logits, rows, step.positions, step.seqlens_kv, state, kept, wanted
                )
        else:
            there = index >= 0
            state.pages.view(-1).index_put_((index[there],), values[there].to(torch.int32))
        newest, step, owners, is_first, counts = lay_out(
            rows, tokens, starts, counts, limits, state, tables, k, self._page_size, longest,
        )  # fmt: skip
        tokens = newest[owners]
        if k:
            assert self._draft is not None
            tokens = torch.where(is_first, tokens, -1)
            tokens = torch.where(is_first, tokens, self._draft(tokens, step))
        logits = self.logits.keep(self._forward(tokens, step, self._places[: len(tokens)]))
        best, chosen = logits.max(dim=-1)  # NaN and +Inf anywhere in a row become its maximum
        sound = torch.isfinite(best).to(torch.int64)
        firsts = step.cu_seqlens_q[:-1].to(torch.int64)
        num_new = accepted(tokens, chosen, owners, is_first, counts)
        is_there = step.seqlens_kv > 0
        after = torch.where(is_there, step.positions[firsts] + num_new, state.lengths[rows])
        state.tokens.index_copy_(
            0, rows, torch.where(is_there, chosen[firsts + num_new - 1], newest)
        )
        state.lengths.index_copy_(0, rows, after)
        chosen = torch.where(is_there[owners], chosen, -1)
        sound = torch.where(is_there[owners], sound, 1)
        if not k:
            return logits, torch.cat([sound, chosen])
        return logits, torch.cat([sound, chosen, tokens, counts])

    def _choose(self, size: int) -> tuple[Tensor, Tensor]:
        """The recorded choice of tokens from the first `size` rows of the shared logits."""
        logits, numbers = self.logits.rows(size), self._numbers[:, :size]
        if has_kernels(self.state.device):
            from kvant.execution.triton_step import most_likely

            return logits, most_likely(
                logits, numbers[_ROWS], numbers[_STARTS], numbers[_COUNTS], self.state
            )
        best, chosen = logits.max(dim=-1)
        self.state.tokens.index_copy_(0, numbers[_ROWS], chosen)
        self.state.lengths.index_copy_(0, numbers[_ROWS], numbers[_STARTS] + 1)
        return logits, torch.cat([torch.isfinite(best).to(torch.int64), chosen])


class MixedGraphs:
    """Graphs of steps with pieces of prompts. One copy sends all host inputs of a step to the device.

    The inputs, all int64: ids, positions [tokens]; lengths, wanted (indices of logits), rows [seqs]; slots
    [tokens] of each group; ends [seqs + 1], the cumulative query lengths.
    """

    def __init__(
        self, graphs: StepGraphs, sizes: Sequence[PieceSize], device: torch.device
    ) -> None:
        self._graphs, self._sizes = graphs, sizes
        tokens, seqs, _ = (max(side) for side in zip(*sizes, strict=True))
        self._num_groups = graphs.state.num_groups
        self.room = sum(self._counts(tokens, seqs))
        self._memory = torch.zeros(self.room, dtype=torch.int64, device=device)
        self._replays: dict[PieceSize, Callable[[], None]] = {}

    @property
    def num_sizes(self) -> int:
        return len(self._sizes)

    def capture(self, recorder: Recorder, on_progress: Callable[[], None]) -> None:
        """Records every size, the largest first, with all tokens padding.

        on_progress: called after each size.
        """
        for size in reversed(self._sizes):
            _, _, _, _, rows, *slots, _ = self._views(self._memory, size.tokens, size.seqs)
            for some in slots:
                some.fill_(-1)
            rows.fill_(self._graphs.state.padding_row)
            replay, _ = recorder.record(partial(self._run, size))
            self._replays[size] = replay
            self._memory.zero_()
            on_progress()

    def run(self, batch: Batch, schedule: Schedule, staging: _Staging) -> bool:
        """Replays a step into the shared logits. Returns False if no recorded size fits it."""
        step = batch.step
        # Short pieces use the kernel for paged attention with or without a graph.
        read = step.seqlens_kv[torch.from_numpy(schedule.counts) >= LONG]
        if len(read) and (int(read.max()) > MOST_CONTEXT or int(read.sum()) > MOST_READ):
            return False
        num_tokens, num_rows = len(batch.input_ids), len(batch.logits_index)
        needed = max(num_rows, len(schedule.rows))
        fits = (
            size
            for size in self._sizes
            if size.tokens >= num_tokens
            and size.seqs >= needed
            and size.longest >= step.max_seqlen_q
        )
        if (size := next(fits, None)) is None:
            return False
        sources = (
            (batch.input_ids, 0), (step.positions, 0),
            (step.seqlens_kv, 0), (batch.logits_index, 0),
            (torch.from_numpy(schedule.rows), self._graphs.state.padding_row),
            *((one.slot_mapping, -1) for one in (step, *step.others)),
            (step.cu_seqlens_q, num_tokens),
        )  # fmt: skip
        views = self._views(staging.mixed, size.tokens, size.seqs)
        for target, (source, padding) in zip(views, sources, strict=True):
            target[: len(source)] = source
            target[len(source) :] = padding
        room = sum(self._counts(size.tokens, size.seqs))
        self._memory[:room].copy_(staging.mixed[:room], non_blocking=True)
        self._replays[size]()
        return True

    def _counts(self, tokens: int, seqs: int) -> list[int]:
        # seqs + 1 comes last: kernels would be compiled once more for addresses that 16 does not divide.
        return [tokens, tokens, seqs, seqs, seqs, *[tokens] * self._num_groups, seqs + 1]

    def _views(self, memory: Tensor, tokens: int, seqs: int) -> tuple[Tensor, ...]:
        sizes = self._counts(tokens, seqs)
        return torch.split(memory[: sum(sizes)], sizes)

    def _run(self, size: PieceSize) -> tuple[Tensor]:
        """The recorded step: runs the model on the inputs in `_memory`."""
        graphs, state = self._graphs, self._graphs.state
        tokens, seqs, longest = size
        ids, positions, lengths, wanted, rows, *slots, ends = self._views(
            self._memory, tokens, seqs
        )
        # Decodes come first, with one token each; only they can wait for a token of the step before.
        ids[:seqs] = torch.where(ids[:seqs] < 0, state.tokens.index_select(0, rows), ids[:seqs])
        seqlens, tables = lengths.to(torch.int32), graphs._tables[:, :seqs]
        if has_kernels(state.device):
            from kvant.execution.triton_step import gather_pages

            gather_pages(state, rows, seqlens, tables, graphs._page_size)
        else:
            _copy_tables(state, rows, tables)
        step = Step(
            cu_seqlens_q=ends.to(torch.int32),
            seqlens_kv=seqlens,
            page_table=tables[0],
            slot_mapping=slots[0],
            positions=positions,
            max_seqlen_q=longest,
            max_seqlen_kv=graphs._max_model_len,
        )
        step = with_groups(step, list(zip(tables[1:].unbind(), slots[1:], strict=True)))
        # Graphs share their memory; only these logits are read after the replay.
        return (graphs.logits.keep(graphs._forward(ids, step, wanted)),)


def lay_out(
    rows: Tensor,
    tokens: Tensor,
    starts: Tensor,
    counts: Tensor,
    limits: Tensor,
    state: DeviceState,
    tables: Tensor,
    num_drafts: int,
    page_size: int,
    max_model_len: int,
) -> tuple[Tensor, Step, Tensor, Tensor, Tensor]:
    """Lays out the tokens of a step: n sequences with one token and up to k drafts each, T = n (1 + k).

    rows: [n] int64. tokens, starts: [n] int64; a negative value is replaced by the row's value on the device.
    counts: [n] int64, tokens including drafts; 0 for padding, which stores nothing and attends to nothing.
    limits: [n] int64, the first position that may not be stored; a sequence that starts there is padding.
    tables: [groups, n, columns] int32, overwritten.
    Returns the newest tokens [n]; the step; owners [T] int64, each token's sequence (the last one for
    unused tokens); is_first [T] bool, true at newest tokens; counts [n] int64, at least 1.
    """
    count = rows.shape[0]
    starts = torch.where(starts < 0, state.lengths.index_select(0, rows), starts)
    is_there = (counts > 0) & (starts < limits)
    counts = torch.minimum(counts, limits - starts)
    starts = torch.where(is_there, starts, 0)
    tokens = torch.where(tokens < 0, state.tokens.index_select(0, rows), tokens)
    _copy_tables(state, rows, tables)
    counts = counts.clamp(min=1)
    cu_seqlens = torch.zeros(count + 1, dtype=torch.int64, device=rows.device)
    cu_seqlens[1:] = counts.cumsum(0)
    places = torch.arange(count * (1 + num_drafts), device=rows.device)
    is_token = places < cu_seqlens[-1]
    owners = torch.searchsorted(cu_seqlens[1:], places, right=True).clamp_(max=count - 1)
    offsets = places - cu_seqlens[owners]
    positions = torch.where(is_token, starts[owners] + offsets, 0)
    columns = (positions // page_size).clamp_(max=tables.shape[2] - 1)
    slots = tables[:, owners, columns].to(torch.int64) * page_size + positions % page_size
    slots = torch.where(is_token & is_there[owners], slots, -1)
    step = Step(
        cu_seqlens_q=cu_seqlens.to(torch.int32),
        seqlens_kv=torch.where(is_there, starts + counts, 0).to(torch.int32),
        page_table=tables[0],
        slot_mapping=slots[0],
        positions=positions,
        max_seqlen_q=1 + num_drafts,
        max_seqlen_kv=max_model_len,
        rows=rows,
    )
    step = with_groups(step, list(zip(tables[1:].unbind(), slots[1:].unbind(), strict=True)))
    return tokens, step, owners, offsets == 0, counts


def _copy_tables(state: DeviceState, rows: Tensor, tables: Tensor) -> None:
    """Copies the page ids of `rows` [n] int64 into `tables` [groups, n, columns] int32."""
    for group, table in enumerate(tables.unbind()):
        table.copy_(state.pages_of(group).index_select(0, rows)[:, : table.shape[1]])


def accepted(
    tokens: Tensor, chosen: Tensor, owners: Tensor, is_first: Tensor, counts: Tensor
) -> Tensor:
    """Returns how many tokens each sequence gets, [n] int64: its accepted drafts and one of the target's own.

    tokens: [T], the tokens that were run. chosen: [T], the token that the target chooses after each of them.
    A draft is accepted if all drafts before it are, and it equals the token chosen at its place.
    """
    if len(tokens) == len(counts):
        return counts
    differs = torch.zeros_like(is_first)
    differs[1:] = tokens[1:] != chosen[:-1]
    # The first draft that is not accepted, by its offset. Unused tokens lie beyond the counts.
    offsets = torch.arange(len(tokens), device=tokens.device)
    begins = counts.cumsum(0) - counts
    offsets = torch.where(differs & ~is_first, offsets - begins[owners], len(tokens))
    return counts.scatter_reduce(0, owners, offsets, "amin")


def _read(
    staging: _Staging, found: Tensor, count: int, first_rows: list[int], is_final: bool
) -> Outcome:
    """Waits for a step in which each sequence got one token. found: sound and tokens, [size] each."""
    staging.done.synchronize()
    sound, tokens = found.view(2, -1)[:, :count].numpy()
    return Outcome((sound != 0).tolist(), tokens.tolist(), first_rows, None, is_final)


def _read_drafts(
    staging: _Staging, found: Tensor, count: int, size: int, is_final: bool
) -> Outcome:
    """Waits for a step with drafts. found: sound, chosen and run tokens, [T] each, and counts [size]."""
    staging.done.synchronize()
    counts = found[-size:][:count].numpy()
    ends = counts.cumsum()
    firsts = (ends - counts).tolist()
    sound, chosen, ran = found[:-size].view(3, -1)[:, : int(ends[-1])].numpy()
    drafts = [
        tuple(ran[first + 1 : end].tolist())
        for first, end in zip(firsts, ends.tolist(), strict=True)
    ]
    return Outcome((sound != 0).tolist(), chosen.tolist(), firsts, drafts, is_final)
