"""Chooses what runs in the next step: which sequences, how many tokens, on which pages. Uses no tensors.

One step mixes the next tokens of decoding sequences with pieces of prompts. Order of arrival is the only
priority: the oldest sequence is served first and admitted first, and loses its pages last. So every running
sequence is older than every waiting one.

A step is scheduled while the step before it still runs. The scheduler counts a step as run once it is
scheduled; `commit` later takes back rejected drafts. If a decision needs the result of the step in flight,
`schedule` returns None, and the caller reads that step first.

Groups without a window get pages for all known tokens at admission, so there only decoding sequences ever
lack one. A sequence waits while another one computes most of its prompt, and then shares those pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvant.attention.need import LONG
from kvant.kv.offload.source import Prompt
from kvant.kv.offload.tiers import Progress, Tiers
from kvant.kv.pages import SCRATCH, SharedPages
from kvant.plan.limits import Limits
from kvant.scheduling.kept_states import KeptStates
from kvant.scheduling.request import FinishReason, Sequence, Status
from kvant.scheduling.row_table import HeldPages

MOST_SHORT = 16
"""The most tokens at the end of a prompt that are computed in short pieces: what a page leaves over."""

FAR = 8192
"""The position from which on they are. Behind fewer tokens they take one step little longer."""

HASHED_PAGES = 512
"""The most pages of a waiting prompt hashed in one step, so that running sequences are not delayed."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """One step of n sequences: first decodes, oldest first, then pieces of prompts, long ones last.

    rows: [n] int64, rows of the row table. numbers: [n] int64, the sequences' numbers, which tell
    whether a row still has the same owner. starts: [n] int64, each sequence's first position in the step;
    too high if drafts in flight are not verified yet, and then the device uses its own position.
    counts: [n] int64, tokens without drafts. samples: [n] bool, whether the step produces a new token of
    the sequence. num_prefills: number of pieces of prompts, which come last.
    limits: [n] int64, -1 for an exact start, else the first position that the sequence may not store; None
    if all starts are exact. is_pending: [n] bool, whether a launched step that was not read yet produces
    the sequence's newest token. max_drafts: [n] int64, drafts that each sequence has room for, or None.
    num_drafts: the requested number of drafts per sequence.
    needs_host: whether the host must compute something between this step's logits and its tokens.
    pages_to_zero: page ids of each group to clear before the step. preempted: sequences that lost their
    pages. states_to_place: (row, page) of the states of admitted sequences.
    states_to_load, states_to_keep: (source page, target page): kept states that sequences start from, copied
    before the step, and states after its pieces to keep, copied after it.
    states_to_accept: (index among the drafts, page): states after the last accepted drafts of the step
    before, copied first.
    """

    sequences: list[Sequence]
    rows: NDArray[np.int64]
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    samples: NDArray[np.bool_]
    num_prefills: int
    limits: NDArray[np.int64] | None
    is_pending: NDArray[np.bool_]
    max_drafts: NDArray[np.int64] | None
    num_drafts: int
    needs_host: bool
    pages_to_zero: list[list[int]]
    preempted: list[Sequence]
    states_to_place: list[tuple[int, int]] = field(default_factory=list)
    states_to_load: list[tuple[int, int]] = field(default_factory=list)
    states_to_keep: list[tuple[int, int]] = field(default_factory=list)
    states_to_accept: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_decodes(self) -> int:
        return len(self.sequences) - self.num_prefills

    @property
    def most_tokens(self) -> NDArray[np.int64]:
        """[n] int64, tokens that each sequence gets if all drafts are accepted."""
        if self.max_drafts is None:
            return self.samples.astype(np.int64)
        return np.where(self.samples, 1 + self.max_drafts, 0)

    @property
    def draft_states(self) -> NDArray[np.int64]:
        """[n] int64, the index of each sequence's first draft among all drafts; it addresses their states."""
        assert self.max_drafts is not None
        return np.cumsum(self.max_drafts) - self.max_drafts

    @property
    def num_tokens(self) -> int:
        """The step's number of tokens, without drafts."""
        return int(self.counts.sum())


@dataclass(slots=True)
class _Pieces:
    """The pieces of prompts chosen so far for a step: (sequence, start, number of tokens).

    budget: tokens that the step still has room for. logprobs_left: prompt tokens that may still be scored.
    stride: a piece that does not end its prompt ends at a multiple of this. short: `Limits.short_piece`
    beside answers, else 0. states: pieces also end where a recurrent state is kept.
    """

    budget: int
    logprobs_left: int
    stride: int
    short: int
    states: KeptStates | None
    chosen: list[tuple[Sequence, int, int]] = field(default_factory=list)

    def room_for(self, sequence: Sequence, start: int) -> int:
        """Returns how many tokens from `start` fit: all, or up to the last place to cut the prompt."""
        left = len(sequence.token_ids) - start
        if left <= self.budget:
            is_short = self.short < left <= MOST_SHORT and start >= FAR
            return self.short if self.short and is_short else left
        return max(0, self.budget - (start + self.budget) % self.stride)

    def add(self, sequence: Sequence, start: int) -> None:
        """Adds a piece with as many of the sequence's tokens as there is room for, if any."""
        count = self.room_for(sequence, start)
        if self.states is not None:
            count = self.states.room(sequence, start, count)
        if sequence.lacks_prompt_logprobs:
            count = min(count, self.logprobs_left)
            self.logprobs_left -= count
        if count:
            self.chosen.append((sequence, start, count))
            self.budget -= count


class Scheduler:
    """Holds sequences from arrival to end; the only writer of their tokens, status and rows.

    The caller runs the step that `schedule` returns, appends the step's tokens, then calls `commit`.
    tiers: hold pages evicted from `allocator`. A sequence waits in the queue while its pages are fetched.
    """

    def __init__(self, limits: Limits, allocator: SharedPages, tiers: Tiers | None = None) -> None:
        self.limits = limits
        self.allocator = allocator
        self.tiers = tiers
        self.pages = HeldPages(
            allocator,
            page_size=limits.page_size,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_piece=limits.max_num_batched_tokens,
            prefix_caching=limits.prefix_caching,
            tiers=tiers,
        )
        self.table = self.pages.table
        self.states: KeptStates | None = None
        if allocator.states is not None and limits.state_slots:
            self.states = KeptStates(
                allocator.states,
                limits.state_slots,
                stride=limits.state_stride,
                page_size=limits.page_size,
            )
        self._states_to_place: list[tuple[int, int]] = []
        self._states_to_load: list[tuple[int, int]] = []
        self._states_to_accept: list[tuple[int, int]] = []
        self._waiting: deque[Sequence] = deque()  # oldest first
        self._running: list[Sequence] = []  # oldest first
        # A copy of `_running` and its rows; None after `_running` changed.
        self._order: tuple[list[Sequence], NDArray[np.int64]] | None = None
        self._in_flight: list[Schedule] = []
        self._unlooked: set[int] = set()  # numbers of waiting requests that still need `_look`
        self._next_order = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def may_run_prompts(self) -> bool:
        """True if the next step may run a piece of a prompt."""
        if self._waiting and len(self._running) < self.limits.max_num_seqs:
            return True
        _, rows = self._ordered()
        return bool((self.table.num_tokens[rows] - self.table.num_computed[rows] > 1).any())

    def sequences(self) -> list[Sequence]:
        """Returns all running and waiting sequences, oldest first."""
        return [*self._running, *self._waiting]

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. It must fit into the empty pool, as every checked request does."""
        assert sequence.request.max_total_tokens <= self.limits.max_model_len
        assert self.pages.fits_alone(sequence.request.max_total_tokens)
        sequence.order = self._next_order
        self._next_order += 1
        self._waiting.append(sequence)
        if self.tiers is not None and self.tiers.has_sources:
            if sequence.num_tokens > HASHED_PAGES * self.limits.page_size:
                self._unlooked.add(sequence.number)  # hashing a long prompt takes several steps
            else:
                self._look(self.tiers, sequence)

    def _look(self, tiers: Tiers, sequence: Sequence) -> None:
        """Looks for a sequence's pages in files and in other engines."""
        first = len(self.pages.find_prefix(sequence)[0])
        if self.limits.prefix_caching and not sequence.lacks_prompt_logprobs:
            digests = sequence.prefix_hashes[first + 1 :]
            prompt = Prompt(sequence.request.salt, sequence.request.prompt_token_ids)
            tiers.look(sequence.number, first, digests, prompt)

    def schedule(self, num_draft_tokens: int = 0) -> Schedule | None:
        """Chooses the next step and counts it as launched.

        num_draft_tokens: the most drafts per decoding sequence. Drafts use only tokens and pages that are
        left over. Returns a Schedule without sequences if nothing can run, and None if a step in flight must
        be committed first because pages are short.
        """
        self.pages.take_leaving()
        if self.tiers is not None:
            self.tiers.poll()
        self.pages.trim(*self._ordered())
        chosen = self._decodes()
        if chosen is None:
            return None
        decoding, rows, prefilling, preempted = chosen
        budget = self.limits.max_num_batched_tokens - len(decoding)
        num_preempted = len(preempted)
        short = self.limits.short_piece if decoding else 0
        pieces = self._pieces(prefilling, budget, short, preempted)
        if pieces is None:
            return None
        if len(preempted) > num_preempted:
            places = [i for i, s in enumerate(decoding) if s.status is Status.RUNNING]
            decoding, rows = [decoding[i] for i in places], rows[places]
            prefilling = [s for s in prefilling if s.status is Status.RUNNING]
        if not preempted:  # a sequence that was just preempted would come straight back
            self._admit(pieces, prefilling)
        max_drafts = None
        if num_draft_tokens:  # after prompts, which would wait if drafts took the whole budget
            max_drafts = self._draft_room(decoding, rows, pieces.budget, num_draft_tokens)
        return self._launch(decoding, rows, pieces, max_drafts, num_draft_tokens, preempted)

    def append(self, sequence: Sequence, token: int) -> None:
        """Appends a token that a step chose from finite logits."""
        sequence.token_ids.append(token)

    def append_all(self, appends: Items[Callable[[int], None]], tokens: Items[int]) -> None:
        """Appends one token per sequence of a step. appends: each sequence's bound `token_ids.append`."""
        for append, token in zip(appends, tokens, strict=True):
            append(token)

    def note_rules(self, sequence: Sequence) -> None:
        """Updates whether the host must choose the sequence's tokens, after its rules read a token."""
        if sequence.row >= 0:
            self.table.needs_host[sequence.row] = sequence.needs_host

    def follow(self, sequence: Sequence) -> None:
        """Lets other sequences share the prompt's pages, since a finite token follows it.

        Call before that token is appended. Until then the pages might hold NaN.
        """
        if sequence.row >= 0 and not self.table.is_followed[sequence.row]:
            self.table.is_followed[sequence.row] = True
            self.pages.remember(sequence, len(sequence.token_ids))

    def commit(self, schedule: Schedule, num_found: NDArray[np.int64] | None = None) -> None:
        """Updates the row table after a scheduled step was read.

        num_found: [n] int64, tokens that each sequence got; None if each got the most it could get.
        """
        self._in_flight.remove(schedule)
        rows, drafts = schedule.rows, schedule.max_drafts
        missing = None
        if num_found is not None:
            missing = schedule.most_tokens - num_found
        is_same = self.table.owner[rows] == schedule.numbers
        if self.allocator.states is not None and drafts is not None:
            self._accept(schedule, num_found, is_same)
        if is_same.all():
            self.table.count_read(rows, schedule.samples, drafts, missing)
            return
        here = np.flatnonzero(is_same)  # the others ended, and their rows may have new owners
        self.table.count_read(
            rows[here],
            schedule.samples[here],
            None if drafts is None else drafts[here],
            None if missing is None else missing[here],
        )

    def _accept(
        self,
        schedule: Schedule,
        num_found: NDArray[np.int64] | None,
        is_same: NDArray[np.bool_],
    ) -> None:
        """Schedules copies of the states after the last accepted drafts to the sequences' state pages."""
        accepted = (schedule.most_tokens if num_found is None else num_found) - 1
        places = schedule.draft_states + accepted - 1
        there = is_same & (accepted > 0)
        assert schedule.max_drafts is not None
        for i in np.flatnonzero(there & (schedule.max_drafts > 0)).tolist():
            self._states_to_accept.append((int(places[i]), schedule.sequences[i].state_page))

    def abandon(self) -> list[int]:
        """Drops scheduled steps that were not committed.

        Returns the numbers of their sequences. The caller must end them, since the contents of their pages
        are unknown.
        """
        scheduled, self._in_flight = self._in_flight, []
        return [sequence.number for schedule in scheduled for sequence in schedule.sequences]

    def still_runs(self, schedule: Schedule) -> bool:
        """Returns whether every sequence of a scheduled step still has its row."""
        return bool((self.table.owner[schedule.rows] == schedule.numbers).all())

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence that is running, waiting or not queued yet, and frees its pages.

        Pages that a cancelled sequence added to the prefix cache are dropped. After a numerical error, every
        page that the sequence used is dropped, since any of them may hold the wrong values.
        """
        assert sequence.status is not Status.FINISHED
        if self.tiers is not None:
            self.tiers.end(sequence.number)
            self._unlooked.discard(sequence.number)
        self.pages.forget(sequence, reason)
        if self.states is not None:
            self.states.forget(sequence, reason)
        if sequence.status is Status.RUNNING:
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._remember(sequence)
            self._running.remove(sequence)
            self._order = None
            self.pages.release(sequence, may_wait=bool(self._running))
        elif sequence.order >= 0:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def audit(self) -> list[str]:
        """Checks pages, counts, rows and the queue's order. Returns one sentence per fault."""
        faults = self.pages.audit(self._running)
        faults += [f"request {s.number} waits with pages" for s in self._waiting if s.pages]
        if self.states is not None:
            faults += self.states.audit()
        order = [sequence.order for sequence in (*self._running, *self._waiting)]
        if order != sorted(order):
            faults.append("a younger request stands before an older one")
        return faults

    # -- one step ------------------------------------------------------------------------------

    def _ordered(self) -> tuple[list[Sequence], NDArray[np.int64]]:
        """Returns the running sequences, oldest first, and their rows [n]. The list is never mutated."""
        if self._order is None:
            running = list(self._running)
            self._order = running, np.array([s.row for s in running], np.int64)
        return self._order

    def _decodes(
        self,
    ) -> tuple[list[Sequence], NDArray[np.int64], list[Sequence], list[Sequence]] | None:
        """Returns decoding sequences, their rows, sequences with several tokens to run, and preempted ones.

        Allocates pages that decodes lack. Returns None if a step in flight must be read first. Computes over
        all rows at once: with a thousand sequences a loop would be most of a step's host time.
        """
        table, page_size = self.table, self.limits.page_size
        sequences, rows = self._ordered()
        starts = table.num_computed[rows]
        left = table.num_tokens[rows] - starts
        # Skip sequences whose last token is in flight even if all their drafts are rejected.
        uncertain, end = table.num_uncertain[rows], table.max_tokens[rows] - 1
        is_last = (table.num_pending[rows] > 0) & (starts - uncertain >= end)
        chosen = np.flatnonzero((left == 1) & ~is_last)[: self.limits.max_num_batched_tokens]
        prefilling = [sequences[place] for place in np.flatnonzero(left > 1).tolist()]
        stored = np.where(uncertain > 0, np.minimum(starts, end - 1), starts)
        lacks = chosen[stored[chosen] >= table.num_pages[rows[chosen]] * page_size]
        preempted: list[Sequence] = []
        if len(lacks) > 1 and self.pages.extend_all([sequences[p] for p in lacks.tolist()]):
            lacks = lacks[:0]
        for place in lacks.tolist():
            sequence = sequences[place]
            if sequence.status is not Status.RUNNING or self.pages.extend(sequence, 1):
                continue
            if self._in_flight:
                return None
            self._make_room(sequence, preempted)
        if preempted:
            chosen = np.array(
                [p for p in chosen.tolist() if sequences[p].status is Status.RUNNING], np.int64
            )
            prefilling = [s for s in prefilling if s.status is Status.RUNNING]
        if len(chosen) == len(sequences):
            return sequences, rows, prefilling, preempted
        return [sequences[p] for p in chosen.tolist()], rows[chosen], prefilling, preempted

    def _pieces(
        self, prefilling: Items[Sequence], budget: int, short: int, preempted: list[Sequence]
    ) -> _Pieces | None:
        """Returns the next pieces of started prompts; None if a step in flight must be read first.

        Allocates pages in groups with a window, which grow with each piece. Appends to `preempted`.
        """
        # With a budget below the stride no prompt could be cut at a multiple of it, and none would advance.
        stride = self.limits.prompt_stride if budget >= self.limits.prompt_stride else 1
        pieces = _Pieces(budget, self.limits.max_prompt_logprobs, stride, short, self.states)
        for sequence in prefilling:
            if sequence.status is not Status.RUNNING:
                continue
            start = int(self.table.num_computed[sequence.row])
            end = start + pieces.room_for(sequence, start)
            while not self.pages.reach(sequence, end):
                if self._in_flight:
                    return None
                if self.tiers is not None and self.tiers.give_back():
                    continue
                if self._preempt_youngest(preempted) is sequence:
                    break
            if sequence.status is Status.RUNNING:
                pieces.add(sequence, start)
        return pieces

    def _admit(self, pieces: _Pieces, prefilling: list[Sequence]) -> None:
        """Admits waiting sequences while there is room, and adds their first pieces."""
        computing: list[Sequence] | None = None
        while pieces.budget and self._waiting and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            if sequence.lacks_prompt_logprobs and not pieces.logprobs_left:
                return
            if self.tiers is not None:
                if self.tiers.progress_of(sequence.number) is Progress.MOVING:
                    return
                if self._running and not self.pages.hash_some(sequence, HASHED_PAGES):
                    return
                if sequence.number in self._unlooked:
                    self._unlooked.discard(sequence.number)
                    self._look(self.tiers, sequence)
                    if self.tiers.progress_of(sequence.number) is Progress.MOVING:
                        return
            found = self.pages.find_prefix(sequence)
            if self.states is not None:
                # A shorter prefix needs other pages of windows. Models with states have one group, and none.
                found = [self.states.reach(sequence, found[0])]
            if computing is None:  # prompts of decoding sequences are in the cache already
                computing = self._unshared(prefilling)
            if self.pages.are_mostly_computed(sequence, len(found[0]), computing):
                return
            start = len(found[0]) * self.limits.page_size
            first_piece = pieces.room_for(sequence, start)
            if not first_piece:
                return
            # One page per running sequence stays free: they grow, and would preempt the new one at once.
            spare = len(self._running)
            state = None if self.states is None else self.states.use(sequence, len(found[0]))
            if self.tiers is not None and self._waits_for_pages(
                self.tiers, sequence, found, first_piece, spare
            ):
                return
            if not self.pages.admit(sequence, found, first_piece, spare=spare, state=state):
                if self._running:
                    return
                if self.tiers is not None and self.tiers.give_back():
                    continue
                # Cached pages may be spread over more superblocks than new pages would take.
                found, start, state = [[] for _ in found], 0, None
                first_piece = pieces.room_for(sequence, start)
                alone = self.pages.admit(sequence, found, first_piece, spare=0)
                assert alone, "a request that fits found no pages"
            if self.allocator.states is not None:
                self._states_to_place.append((sequence.row, sequence.state_page))
            if state is not None:
                self._states_to_load.append((state, sequence.state_page))
            if self.tiers is not None:
                self.tiers.end(sequence.number)
            self._waiting.popleft()
            self._running.append(sequence)
            self._order = None
            sequence.status = Status.RUNNING
            if sequence.num_tokens - start > 1:
                computing.append(sequence)
            pieces.add(sequence, start)

    def _waits_for_pages(
        self, tiers: Tiers, sequence: Sequence, found: list[list[int]], first_piece: int, spare: int
    ) -> bool:
        """Returns whether the oldest waiting sequence must wait for pages from tiers.

        Starts to fetch and load them if that is faster than to compute them. found: the result of
        `HeldPages.find_prefix`.
        """
        number = sequence.number
        progress = tiers.progress_of(number)
        if progress in (Progress.MOVING, Progress.SETTLED):
            return progress is Progress.MOVING
        has = tiers.has if progress is Progress.NEW else tiers.in_host
        cut, lacking = self.pages.find_restorable(sequence, has)
        num_tokens = (cut - len(found[0])) * self.limits.page_size
        if not tiers.pays(lacking, num_tokens):
            tiers.settle(number)
            return False
        if tiers.fetch(number, lacking):
            return True
        if (
            tiers.progress_of(number) is not progress
        ):  # host memory has no room for the pages in files
            cut, lacking = self.pages.find_restorable(sequence, tiers.in_host)
            num_tokens = (cut - len(found[0])) * self.limits.page_size
        if lacking and self.pages.has_room(sequence, found, first_piece, spare=spare):
            joined = [[page for page in pages if page != SCRATCH] for pages in found]
            if self.states is not None:  # such models have one group beside that of states
                state = self.states.page_at(sequence, cut)
                joined = [self.pages.present(sequence, cut), [] if state is None else [state]]
            published = self.pages.published_of(sequence, lacking)
            if tiers.load(number, joined, lacking, published, num_tokens):
                return True
        elif lacking and self._running:
            return True  # wait until running sequences free pages
        tiers.settle(number)
        return False

    def _unshared(self, prefilling: list[Sequence]) -> list[Sequence]:
        """Returns sequences whose prompts are being computed, including those in the step in flight."""
        if not self._in_flight:
            return list(prefilling)
        return [s for s in self._running if not self.table.is_followed[s.row]]

    def _draft_room(
        self, decoding: list[Sequence], rows: NDArray[np.int64], budget: int, most: int
    ) -> NDArray[np.int64]:
        """Returns [n] int64, the drafts that each decoding sequence has room for; may allocate free pages.

        A sequence's last allowed token is never run, so no draft may stand there. One page per running
        sequence stays free, so none is preempted for drafts that may be rejected.
        """
        table, page_size = self.table, self.limits.page_size
        next_token, end = table.num_computed[rows] + 1, table.max_tokens[rows] - 1
        uncertain = table.num_uncertain[rows]
        wanted = np.minimum(np.maximum(end - (next_token - uncertain), 0), most)
        stored = np.minimum(next_token + wanted, end)
        missing = -(-stored // page_size) - table.num_pages[rows]
        for place in np.flatnonzero((missing > 0) & (wanted > 0)).tolist():
            count = int(missing[place])
            if self.pages.has_spare(count + len(self._running)):
                self.pages.extend(decoding[place], count)
        room = np.minimum(wanted, table.num_pages[rows] * page_size - next_token)
        # If the position is uncertain, the device drops drafts beyond `Schedule.limits`.
        room = np.where(uncertain > 0, wanted, room)
        taken = np.cumsum(room) - room
        if self.allocator.states is not None:
            budget = min(budget, self.limits.draft_states)
        chosen: NDArray[np.int64] = np.clip(budget - taken, 0, room)
        return chosen

    def _launch(
        self,
        decoding: list[Sequence],
        rows: NDArray[np.int64],
        pieces: _Pieces,
        max_drafts: NDArray[np.int64] | None,
        num_drafts: int,
        preempted: list[Sequence],
    ) -> Schedule:
        """Returns the step as a Schedule, and counts it as run in the row table."""
        table = self.table
        sequences = decoding
        starts = table.num_computed[rows]
        counts = np.ones(len(rows), np.int64)
        chosen = sorted(pieces.chosen, key=lambda piece: _backend_order(piece[1], piece[2]))
        if chosen:
            sequences = [*decoding, *(piece[0] for piece in chosen)]
            rows = np.append(rows, [piece[0].row for piece in chosen])
            starts = np.append(starts, [piece[1] for piece in chosen])
            counts = np.append(counts, [piece[2] for piece in chosen])
            if max_drafts is not None:
                max_drafts = np.append(max_drafts, np.zeros(len(chosen), np.int64))
        if max_drafts is not None and not max_drafts.any():
            max_drafts = None
        samples = starts + counts == table.num_tokens[rows]
        uncertain = table.num_uncertain[rows]
        needs_host = bool((table.needs_host[rows] & samples).any()) or any(
            piece[0].lacks_prompt_logprobs for piece in chosen
        )
        schedule = Schedule(
            sequences=sequences,
            rows=rows,
            numbers=table.owner[rows],
            starts=starts,
            counts=counts,
            samples=samples,
            num_prefills=len(chosen),
            limits=self._limits(rows, uncertain) if uncertain.any() else None,
            is_pending=table.num_pending[rows] > 0,
            max_drafts=max_drafts,
            num_drafts=num_drafts,
            needs_host=needs_host,
            pages_to_zero=self.allocator.take_pages_to_zero(),
            preempted=preempted,
            states_to_place=self._states_to_place,
            states_to_load=self._states_to_load,
            states_to_keep=self._keep(chosen),
            states_to_accept=self._states_to_accept,
        )
        self._states_to_place, self._states_to_load, self._states_to_accept = [], [], []
        if sequences:
            self._in_flight.append(schedule)
            table.count_launched(rows, counts, samples, max_drafts)
        return schedule

    def _keep(self, pieces: Items[tuple[Sequence, int, int]]) -> list[tuple[int, int]]:
        """Returns copies (source page, target page) of the states to keep after these pieces."""
        found: list[tuple[int, int]] = []
        if self.states is None:
            return found
        for sequence, start, count in pieces:
            page = self.states.keep(sequence, start + count)
            if page is not None:
                found.append((sequence.state_page, page))
        return found

    def _limits(self, rows: NDArray[np.int64], uncertain: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `Schedule.limits`: [n] int64, the first position not to store; -1 for an exact start."""
        table = self.table
        stored = np.minimum(
            table.max_tokens[rows] - 1, table.num_pages[rows] * self.limits.page_size
        )
        return np.where(uncertain > 0, stored, -1)

    # -- pages that run short ------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, preempted: list[Sequence]) -> None:
        """Allocates one more page for a sequence by preempting the youngest, which may be this one itself."""
        while not self.pages.extend(sequence, 1):
            if self.tiers is not None and self.tiers.give_back():
                continue
            if self._preempt_youngest(preempted) is sequence:
                return

    def _preempt_youngest(self, preempted: list[Sequence]) -> Sequence:
        """Preempts the youngest running sequence, appends it to `preempted` and returns it."""
        youngest = self._running[-1]
        self._preempt(youngest)
        preempted.append(youngest)
        return youngest

    def _preempt(self, sequence: Sequence) -> None:
        """Frees the youngest sequence's pages and puts it at the head of the queue, to be computed again."""
        assert self._running[-1] is sequence
        assert not self._in_flight
        self._running.pop()
        self._order = None
        self._remember(sequence)
        self.pages.release(sequence)
        self._waiting.appendleft(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1

    def _remember(self, sequence: Sequence) -> None:
        """Offers the pages of a sequence's tokens to the cache, except the newest, which was not run."""
        if self.table.is_followed[sequence.row]:
            self.pages.remember(sequence, len(sequence.token_ids) - 1)


def _backend_order(start: int, num_tokens: int) -> tuple[int, int]:
    """Returns a sort key for pieces: backends want long ones last, and equal kinds and sizes together."""
    if num_tokens < LONG:
        return 0, 0
    return 2 - (start > 0), num_tokens
