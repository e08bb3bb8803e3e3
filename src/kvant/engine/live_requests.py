"""All requests that have not ended, and what each step that was run gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat

import numpy as np

from kvant.engine.forms import Forms
from kvant.engine.live import Live
from kvant.engine.result import Progress, Result
from kvant.errors import RequestError
from kvant.execution.batch import Launched, Outcome
from kvant.sampling.sampler import RowRequest, RowSampler, Sampled, greedy, token_logprobs
from kvant.scheduling.request import FinishReason, Sequence, Status
from kvant.scheduling.scheduler import Schedule, Scheduler
from kvant.speculative.accept import verify

Sample = Callable[[int], Sampled]
"""A row of a step's logits -> its token."""

# What a named tuple's own constructor calls, without the call around it.
_progress = partial(tuple.__new__, Progress)


class LiveRequests:
    """Gives requests their tokens, and ends them.

    by_number: every request from its submission to its end, also while its grammar is compiled.
    """

    def __init__(self, scheduler: Scheduler, forms: Forms) -> None:
        self._scheduler = scheduler
        self._forms = forms
        self.by_number: dict[int, Live] = {}
        self._batch: _Batch | None = None

    def cancel(self, number: int) -> Result | None:
        """End a request now; its pages are free at once. None if it has ended already."""
        live = self.by_number.get(number)
        if live is None:
            return None
        result = self._finish(live, FinishReason.CANCELLED)
        live.tell(Progress(number, (), "", result))
        return result

    def note_stream(self) -> None:
        """A request's text is read as a stream from now on, which ends shortcuts for it."""
        self._batch = None

    def commit(self, launched: Launched) -> tuple[list[Progress], Outcome, list[list[int]]]:
        """Read a step, and give every sequence what it found. Waits for the step.

        Returns what became of each request, the outcome, and the tokens that each sequence got; the
        last is empty where each got the one token that it could get.
        """
        schedule, outcome = launched.schedule, launched.read()
        progress = self._commit_plain(schedule, outcome)
        if progress is not None:
            self._scheduler.commit(schedule)
            return progress, outcome, []
        progress, emitted = self._commit_each(launched, outcome)
        found = np.array([len(tokens) for tokens in emitted], np.int64)
        self._scheduler.commit(schedule, found)
        return progress, outcome, emitted

    # -- one step ------------------------------------------------------------------------------

    def _commit_plain(self, schedule: Schedule, outcome: Outcome) -> list[Progress] | None:
        """Append a token to every sequence, where that is all that happens; None where it is not.

        At a thousand sequences a loop that asks each of them would be most of a step's host time.
        """
        has_drafts = schedule.max_drafts is not None or schedule.limits is not None
        if not outcome.is_final or has_drafts or schedule.num_prefills:
            return None
        batch = self._batch
        if batch is None or batch.sequences is not schedule.sequences:
            batch = self._batch = _Batch(schedule.sequences, self.by_number)
        tokens = outcome.tokens
        table = self._scheduler.table
        if not (
            batch.is_simple
            and batch.stop_tokens.isdisjoint(tokens)
            and all(outcome.sound)
            and self._scheduler.still_runs(schedule)
            and (schedule.starts + 2 < table.max_tokens[schedule.rows]).all()
            and table.is_followed[schedule.rows].all()
        ):
            return None
        self._scheduler.append_all(batch.appends, tokens)
        texts: Iterable[str] = repeat("")
        if batch.texts:
            texts = [text.push(token) for text, token in zip(batch.texts, tokens, strict=True)]
        each = zip(
            batch.numbers, zip(tokens), texts, repeat(None), repeat(()), repeat(None), strict=False
        )
        return list(map(_progress, each))

    def _commit_each(
        self, launched: Launched, outcome: Outcome
    ) -> tuple[list[Progress], list[list[int]]]:
        """Give each sequence its tokens, one after the other."""
        schedule = launched.schedule
        sample = self._sampler(launched, outcome)
        broken = self._score(launched)
        progress: list[Progress] = []
        emitted: list[list[int]] = []
        drafts = outcome.drafts
        samples = schedule.samples.tolist()
        for place, sequence in enumerate(schedule.sequences):
            pieces: list[Progress] = []
            row = outcome.first_rows[place]
            if sequence.status is Status.FINISHED:
                pass  # cancelled, or ended by the step before
            elif sequence in broken:
                pieces = [self._follow(sequence, Sampled(None))]
            elif samples[place] and drafts is not None and drafts[place]:

                def choose(ahead: int, row: int = row, sequence: Sequence = sequence) -> Progress:
                    return self._follow(sequence, sample(row + ahead))

                pieces = verify(drafts[place], choose, _goes_on_with)
            elif samples[place]:
                pieces = [self._follow(sequence, sample(row))]
            progress += pieces
            emitted.append([token for piece in pieces for token in piece.token_ids])
        return progress, emitted

    def _sampler(self, launched: Launched, outcome: Outcome) -> Sample:
        """What chooses the tokens of a step's rows."""
        if outcome.is_final:
            return lambda row: Sampled(outcome.tokens[row] if outcome.sound[row] else None)
        schedule, drafts = launched.schedule, outcome.drafts
        wanted = [
            RowRequest(
                outcome.first_rows[place] + ahead, sequence.request.params, sequence.rules,
                sequence.request.seed, sequence.num_output_tokens + ahead, ahead,
            )
            for place, sequence in enumerate(schedule.sequences)
            if schedule.samples[place]
            for ahead in range(1 + (0 if drafts is None else len(drafts[place])))
        ]  # fmt: skip
        return RowSampler(launched.logits, wanted, outcome.sound, outcome.tokens).sample

    def _score(self, launched: Launched) -> list[Sequence]:
        """Note log-probabilities of prompt tokens. Returns sequences whose logits are not finite."""
        batch = launched.batch
        if batch is None or not batch.scored:
            return []
        broken, begin = [], batch.num_sampled
        for sequence, first, count in batch.scored:
            rows = launched.logits[begin : begin + count]
            begin += count
            if not all(greedy(rows)[0]):
                broken.append(sequence)
                continue
            num_top = sequence.request.params.prompt_logprobs
            assert num_top is not None
            assert sequence.prompt_logprobs is not None
            followers = sequence.token_ids[first + 1 : first + 1 + count]
            # What a preempted sequence computes again replaces what it had.
            sequence.prompt_logprobs[first:] = token_logprobs(rows, followers, num_top)
        return broken

    def _follow(self, sequence: Sequence, sampled: Sampled) -> Progress:
        """What a sampled token, or the lack of one, makes of a sequence."""
        if sampled.token_id is not None or sampled.error is not None:
            # Never where there is no token: pages that hold NaN must not be shared.
            self._scheduler.follow(sequence)
        live = self.by_number[sequence.number]
        piece = self._take(live, sampled)
        if live.stream is not None:
            live.tell(piece)
        return piece

    def _take(self, live: Live, sampled: Sampled) -> Progress:
        """Append a token, show its text, and end the request where it ends."""
        sequence, number = live.sequence, live.sequence.number
        first = sequence.num_output_tokens == 0
        if sampled.error is not None:
            return self.refuse(live, sampled.error)
        if sampled.token_id is None:
            result = self._finish(live, FinishReason.NUMERICAL_ERROR)
            return Progress(number, (), "", result)
        prompt_logprobs = live.prompt_logprobs if first else None
        if sequence.num_tokens == sequence.request.max_total_tokens:  # max_tokens 0
            result = self._finish(live, FinishReason.LENGTH)
            return Progress(number, (), result.text, result, (), prompt_logprobs)
        token = sampled.token_id
        self._scheduler.append(sequence, token)
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        sequence.logprobs += logprobs
        try:
            text, reason = live.advance(token)
        except RequestError as fault:
            return self.refuse(live, fault)
        if reason is None:
            return Progress(number, (token,), text, None, logprobs, prompt_logprobs)
        before = live.shown
        result = self._finish(live, reason)
        text += result.text[len(before) :]
        return Progress(number, (token,), text, result, logprobs, prompt_logprobs)

    def refuse(self, live: Live, fault: RequestError) -> Progress:
        """End a request as refused."""
        live.error = fault
        return Progress(live.number, (), "", self._finish(live, FinishReason.REFUSED))

    def _finish(self, live: Live, reason: FinishReason) -> Result:
        num_pages = len(live.sequence.pages)
        self._forms.cancel(live.number)
        self._scheduler.finish(live.sequence, reason)
        del self.by_number[live.number]
        return live.result(reason, num_pages)


class _Batch:
    """What `_commit_plain` needs of the sequences of a step, kept while the same ones run.

    is_simple: whether tokens are all that any of them wants, and only a stop token can end it early.
    """

    def __init__(self, sequences: list[Sequence], lives: dict[int, Live]) -> None:
        self.sequences = sequences
        found = [live for s in sequences if (live := lives.get(s.number)) is not None]
        self.is_simple = len(found) == len(sequences) and all(live.is_simple for live in found)
        self.numbers = [live.number for live in found]
        self.appends = [live.sequence.token_ids.append for live in found]
        self.texts = [live.text for live in found if live.text is not None]  # of all, or of none
        self.stop_tokens = frozenset().union(*(live.stop_tokens for live in found))


def _goes_on_with(piece: Progress) -> int | None:
    """The token that a sequence goes on from; None where it ended."""
    return piece.token_ids[-1] if piece.result is None else None
