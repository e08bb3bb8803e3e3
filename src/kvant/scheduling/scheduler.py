"""Who runs in the next step, with how many tokens, on which pages. No model, no tensors.

One step mixes the next token of those that are answering with pieces of prompts of those that are not
yet. Order of arrival is the only priority: whoever came first is served first, admitted first, and
loses its pages last. Since admission never skips the head of the queue and preemption always takes the
youngest, every running sequence is older than every waiting one.

Pages for all known tokens are taken at admission, so that only answering sequences ever lack one. What
holding and sharing them takes is in `kvant.scheduling.held_pages`.

A sequence most of whose prompt another one is computing at this moment waits until it can share those
pages: several answers to one prompt, or requests with the same long beginning, compute it once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType

from kvant.kv.pages import PageAllocator
from kvant.plan.limits import Limits
from kvant.scheduling.held_pages import HeldPages
from kvant.scheduling.request import FinishReason, Sequence, Status
from kvant.scheduling.schedule import Chunk, Schedule, for_backends, made_chunk

_NOWHERE_ELSE: Mapping[int, int] = MappingProxyType({})


class Scheduler:
    """Sequences from arrival to end. The caller runs what `schedule` returns, then calls `advance`.

    changes: how often a sequence has come, begun to run, been preempted or ended.
    """

    def __init__(self, limits: Limits, allocator: PageAllocator) -> None:
        self.limits = limits
        self.allocator = allocator
        self.pages = HeldPages(
            allocator,
            page_size=limits.page_size,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            prefix_caching=limits.prefix_caching,
        )
        self.page_table = self.pages.table
        self._waiting: deque[Sequence] = deque()  # oldest first
        self._running: list[Sequence] = []  # oldest first
        self.changes = 0
        self._next_order = 0
        self._logprobs_left = 0  # of this step's max_prompt_logprobs
        self._stride = 1  # this step's prompt_stride

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def sequences(self) -> list[Sequence]:
        """Everything that is running or waiting, oldest first."""
        return [*self._running, *self._waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit into the pool alone: whoever makes requests checks that."""
        assert sequence.request.max_total_tokens <= self.limits.max_model_len
        assert self.pages.count_for(sequence.request.max_total_tokens) <= self.allocator.num_usable
        self.changes += 1
        sequence.order = self._next_order
        self._next_order += 1
        self._waiting.append(sequence)

    def schedule(self, num_draft_tokens: int = 0, *, answers_first: bool = False) -> Schedule:
        """Choose the next step. Empty chunks only if nothing is waiting or running.

        num_draft_tokens: room for so many drafts behind each next token, where tokens and pages are
        to spare: drafts take nobody's place. answers_first: whoever waits waits for another step, if
        anybody is answered in this one.
        """
        self._logprobs_left = self.limits.max_prompt_logprobs
        chunks, prefilling, preempted = self._schedule_decodes()
        is_open = not preempted and not (answers_first and chunks and not prefilling)
        budget = self.limits.max_num_batched_tokens - len(chunks)
        prefills = self._schedule_prefills(prefilling, budget)
        has_everyone = not self._waiting
        if is_open:  # whoever was just sent away would come straight back
            left = budget - sum(chunk.num_tokens for chunk in prefills)
            has_everyone = self._admit(prefills, prefilling, left)
        if num_draft_tokens:  # last: before prompts, drafts of a full batch would keep them waiting
            left = budget - sum(chunk.num_tokens for chunk in prefills)
            self._schedule_drafts(chunks, left, num_draft_tokens)
        if self.limits.pages_ahead and not preempted:
            self._grow_behind(prefills)
        prefills.sort(key=for_backends)
        chunks += prefills
        zero = self.allocator.take_pages_to_zero()
        return Schedule(chunks, zero, preempted, len(prefills), has_everyone)

    def plan(self, chunks: list[Chunk]) -> Schedule | None:
        """The step behind one of these chunks that is not read yet, if it runs pieces of prompts.

        Who is answered in that one is a token further here, which nobody knows. Whoever ends meanwhile is
        to be left out (`Schedule.of_those_left`). None, and nothing has changed but that pages may have
        been taken early, where the step is not known: pages are missing, or somebody's tokens are not
        found by the device alone. Those who wait are admitted as they would be, a step early.
        """
        next_ones = [*islice(self._waiting, self.limits.max_num_seqs - len(self._running))]
        if not all(map(_is_found_there, next_ones)):
            return None
        ends = {chunk.sequence.number: chunk.start + chunk.num_tokens for chunk in chunks}
        page_size = self.limits.page_size
        decodes: list[Chunk] = []
        prefilling: list[Sequence] = []
        ending: list[Sequence] = []  # their prompts: nobody can share them before they are followed
        for sequence in self._running:
            number, known = sequence.request.number, len(sequence.token_ids)
            start = ends.get(number, sequence.num_computed_tokens)
            if not _is_found_there(sequence):
                return None
            if start < known:
                if known - start == 1 and number not in ends:
                    return None  # an answer that the step has no room for
                prefilling.append(sequence)
                continue
            if not sequence.is_followed:
                ending.append(sequence)
            if known + 1 >= sequence.request.max_total_tokens:
                continue  # the token that is found now is its last one
            if start >= len(sequence.pages) * page_size:
                return None
            decodes.append(made_chunk((sequence, start, 1, 0, ())))
        if not prefilling and not next_ones:
            return None
        budget = self.limits.max_num_batched_tokens - len(decodes)
        if budget <= 0:
            return None
        prefills = self._schedule_prefills(prefilling, budget, ends)
        left = budget - sum(chunk.num_tokens for chunk in prefills)
        has_everyone = self._admit(prefills, prefilling + ending, left)
        if not prefills:
            return None
        for chunk in decodes:
            self.pages.grow_early(chunk.sequence, chunk.start + 1)
        self._grow_behind(prefills)
        prefills.sort(key=for_backends)
        zero = self.allocator.take_pages_to_zero()
        return Schedule([*decodes, *prefills], zero, [], len(prefills), has_everyone)

    def advance(self, sequence: Sequence, num_computed_tokens: int, *, followed: bool) -> None:
        """K and V of its first tokens are in its pages.

        followed: whether a token followed them. Only then are full pages found by others: before, nobody
        knows that what they hold are numbers. Those of its prompt are found from then on, those of its
        answer once it has ended or lost them.
        """
        sequence.num_computed_tokens = num_computed_tokens
        sequence.is_followed = followed
        if sequence.num_remembered_pages < sequence.num_prompt_tokens // self.limits.page_size:
            self.pages.remember(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, running or waiting; all its pages come back.

        What a cancelled one brought into the prefix cache is forgotten. After a numerical error that
        holds for every page it used: one of them may be where the error came from.
        """
        assert sequence.status is not Status.FINISHED
        self.changes += 1
        self.pages.forget(sequence, reason)
        if sequence.status is Status.RUNNING:
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.pages.remember(sequence)
            self._running.remove(sequence)
            self.pages.take_back(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def audit(self) -> list[str]:
        """Recompute pages, counts and rows; what does not add up, in words."""
        faults = self.pages.audit(self._running)
        faults += [f"request {s.number} waits with pages" for s in self._waiting if s.pages]
        order = [sequence.order for sequence in (*self._running, *self._waiting)]
        if order != sorted(order):
            faults.append("a younger request stands before an older one")
        return faults

    # -- one step ------------------------------------------------------------------------------

    def _schedule_decodes(self) -> tuple[list[Chunk], list[Sequence], list[Sequence]]:
        """One token for each answering sequence; also those with more to run, and those preempted.

        The only loop over everything that runs: it decides what a step costs at a thousand sequences.
        """
        chunks: list[Chunk] = []
        prefilling: list[Sequence] = []
        preempted: list[Sequence] = []
        budget, page_size = self.limits.max_num_batched_tokens, self.limits.page_size
        # The token whose page is missing: this one, or with `pages_ahead` the next one too.
        ahead = 1 if self.limits.pages_ahead else 0
        grow_early = []
        for sequence in tuple(self._running):
            start = sequence.num_computed_tokens
            if len(sequence.token_ids) - start > 1:
                prefilling.append(sequence)
                continue
            if len(chunks) == budget:
                break
            room = len(sequence.pages) * page_size
            if start + ahead >= room:
                # A younger one may have lost its pages to an older one a moment ago; it has none then.
                if start >= room and (
                    sequence.status is not Status.RUNNING or not self._grow(sequence, preempted)
                ):
                    continue
                grow_early.append(sequence)
            chunks.append(made_chunk((sequence, start, 1, 0, ())))
        if preempted:
            prefilling = [s for s in prefilling if s.status is Status.RUNNING]
        elif ahead:
            for sequence in grow_early:
                self.pages.grow_early(sequence)
        return chunks, prefilling, preempted

    def _schedule_drafts(self, chunks: list[Chunk], budget: int, most: int) -> None:
        """Room for drafts behind decodes, in what the prompts of the step leave; all chunks are decodes."""
        for place, chunk in enumerate(chunks):
            sequence = chunk.sequence
            # The last token that a sequence may have is never run, so nothing can follow it.
            left = sequence.request.max_total_tokens - sequence.num_tokens - 1
            wanted = min(most, budget, left)
            if wanted > 0 and self.limits.pages_ahead:
                self._room_behind(sequence, min(left, 2 * most + 1))
            room = self._room_behind(sequence, wanted) if wanted > 0 else 0
            if room > 0:
                chunks[place] = chunk._replace(max_drafts=room)
                budget -= room

    def _room_behind(self, sequence: Sequence, wanted: int) -> int:
        """Of so many tokens behind its last one, how many its pages hold, with more if they are free.

        A page for each running sequence stays: none is to be preempted for what may be rejected.
        """
        missing = self.pages.count_for(sequence.num_tokens + wanted) - len(sequence.pages)
        spare = self.allocator.num_available - len(self._running)
        if 0 < missing <= spare:
            self.pages.extend(sequence, missing)
        return min(wanted, len(sequence.pages) * self.limits.page_size - sequence.num_tokens)

    def _schedule_prefills(
        self, prefilling: list[Sequence], budget: int, starts: Mapping[int, int] = _NOWHERE_ELSE
    ) -> list[Chunk]:
        """starts: by number, of sequences that go on from elsewhere than they are known to be."""
        # With less room than a stride nothing could be cut there, and nobody would get on.
        self._stride = self.limits.prompt_stride if budget >= self.limits.prompt_stride else 1
        chunks: list[Chunk] = []
        for sequence in prefilling:
            if not budget:
                break
            start = starts.get(sequence.number, sequence.num_computed_tokens)
            budget -= self._add_chunk(chunks, sequence, start, budget)
        return chunks

    def _admit(self, chunks: list[Chunk], prefilling: list[Sequence], budget: int) -> bool:
        """Chunks of those who wait, while there is room.

        False if whoever waits first could be begun in the next step, although not in this one.
        """
        while budget and self._waiting and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            if sequence.lacks_prompt_logprobs and not self._logprobs_left:
                return False
            found = self.pages.find_prefix(sequence)
            # The prompts of those that answer can be found already.
            if self.pages.are_mostly_computed(sequence, len(found), prefilling):
                return False
            start = len(found) * self.limits.page_size
            if not self._room_for(sequence, start, budget):
                return not chunks
            # One page for each running sequence stays free: they grow, and would take these pages back.
            if not self.pages.give(sequence, found, spare=len(self._running)):
                assert self._running, "a request that fits the pool found it full of nobody's pages"
                return True
            self.changes += 1
            self._waiting.popleft()
            self._running.append(sequence)
            sequence.status = Status.RUNNING
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                prefilling.append(sequence)
            budget -= self._add_chunk(chunks, sequence, sequence.num_computed_tokens, budget)
        is_full = not self._waiting or len(self._running) == self.limits.max_num_seqs
        return is_full or not chunks

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, start: int, budget: int) -> int:
        """The sequence's tokens from `start`, as many as the step has room for; how many, maybe none."""
        count = self._room_for(sequence, start, budget)
        if sequence.lacks_prompt_logprobs:
            count = min(count, self._logprobs_left)
            self._logprobs_left -= count
        if count:
            chunks.append(Chunk(sequence, start, count))
        return count

    def _room_for(self, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens from `start` that a step with this much room takes: all, or up to where it may be cut."""
        left = len(sequence.token_ids) - start
        if left <= budget:
            return left
        return max(0, budget - (start + budget) % self._stride)

    # -- pages that run short ------------------------------------------------------------------

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """One more page, from the youngest if need be. False if the youngest is this one itself."""
        while not self.pages.extend(sequence, 1):
            youngest = self._running[-1]
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is sequence:
                return False
        return True

    def _grow_behind(self, prefills: list[Chunk]) -> None:
        """The page of the first token behind a prompt, where its last piece runs."""
        for chunk in prefills:
            if chunk.samples:
                self.pages.grow_early(chunk.sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue without pages; its tokens are computed again later."""
        assert self._running[-1] is sequence
        self.changes += 1
        self._running.pop()
        self.pages.remember(sequence)
        self.pages.take_back(sequence)
        self._waiting.appendleft(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1


def _is_found_there(sequence: Sequence) -> bool:
    """Whether the device finds its tokens, and nothing is asked of its prompt."""
    return sequence.is_drawn_alone and not sequence.lacks_prompt_logprobs
