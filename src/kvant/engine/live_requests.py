"""All requests that have not ended, and what a step that ran makes of those that took part."""

from __future__ import annotations

from kvant.engine.forms import Forms
from kvant.engine.live import Live
from kvant.engine.result import Progress, Result
from kvant.engine.steady import one_token
from kvant.errors import RequestError
from kvant.execution.sampler import Sampled
from kvant.execution.stepping import Ran
from kvant.scheduling.request import FinishReason, Sequence, Status
from kvant.scheduling.schedule import Chunk
from kvant.scheduling.scheduler import Scheduler
from kvant.speculative.accept import verify


class LiveRequests:
    """Gives requests their tokens, and ends them.

    by_number: a request is here from its submission to its end, whether the scheduler knows of it or
    its form is still being compiled.
    """

    def __init__(self, scheduler: Scheduler, forms: Forms) -> None:
        self._scheduler = scheduler
        self._forms = forms
        self.by_number: dict[int, Live] = {}

    def cancel(self, number: int) -> Result | None:
        """End a request now; its pages are free at once. None if it has ended already."""
        live = self.by_number.get(number)
        if live is None:
            return None
        result = self._finish(live, FinishReason.CANCELLED)
        live.tell(Progress(number, (), "", result))
        return result

    def emit_all(self, ran: Ran, progress: list[Progress]) -> None:
        """`emit` for every chunk, into `progress`. Where a token is nothing but one more, nobody is asked:
        at a thousand sequences this loop is most of what a step costs the host.
        """
        sound, likeliest = ran.rows.sound, ran.rows.likeliest
        is_final, lives = ran.rows.is_final, self.by_number
        for chunk, row in zip(ran.chunks, ran.first_rows, strict=True):
            sequence, start, num_tokens, _, _ = chunk
            known = start + num_tokens
            request, tokens = sequence.request, sequence.token_ids
            live = lives[request.number]
            if (
                live.is_simple
                and (is_final or sequence.is_plain)
                and known == len(tokens)
                and known + 1 < request.max_total_tokens
                and sound[row]
                and likeliest[row] not in live.stop_tokens
            ):
                if num_tokens == 1 and sequence.is_followed:
                    sequence.num_computed_tokens = known  # its prompt can be found
                else:
                    self._scheduler.advance(sequence, known, followed=True)
                token = likeliest[row]
                tokens.append(token)
                text = "" if live.text is None else live.text.push(token)
                progress.append(one_token((request.number, (token,), text, None, (), None)))
            else:
                progress += self.emit(chunk, ran, row)

    def emit(self, chunk: Chunk, ran: Ran, row: int) -> list[Progress]:
        """What a chunk's sequence gets: nothing, a token, or several where drafts stand.

        row: the first of its rows.
        """
        rows, is_broken = ran.rows, chunk.sequence in ran.broken
        sequence, known = chunk.sequence, chunk.start + chunk.num_tokens
        if not chunk.samples and not is_broken:
            self._scheduler.advance(sequence, known, followed=False)
            return []
        if not chunk.drafts:
            sampled = Sampled(None) if is_broken else rows.sample(row, sequence)
            return [self._follow(sequence, known, sampled)]

        def choose(place: int) -> Progress:
            return self._follow(sequence, known + place, rows.sample(row + place, sequence))

        return verify(chunk.drafts, choose, _goes_on_with)

    def _follow(self, sequence: Sequence, known: int, sampled: Sampled) -> Progress:
        """What became of a sequence that was run up to `known` tokens."""
        if sampled.token_id is not None or sampled.error is not None:
            # Before the token is appended, and never if there is none: nothing that computed NaN
            # is to be found by others.
            self._scheduler.advance(sequence, known, followed=True)
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
        sequence.token_ids.append(token)
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
        live.error = fault
        return Progress(live.number, (), "", self._finish(live, FinishReason.REFUSED))

    def _finish(self, live: Live, reason: FinishReason) -> Result:
        sequence = live.sequence
        num_pages = len(sequence.pages)
        if self._forms.cancel(live.number):  # the scheduler does not know of it yet
            sequence.status, sequence.finish_reason = Status.FINISHED, reason
        else:
            self._scheduler.finish(sequence, reason)
        del self.by_number[live.number]
        return live.result(reason, num_pages)


def _goes_on_with(piece: Progress) -> int | None:
    """The token that a sequence goes on from; None where it ended."""
    return piece.token_ids[-1] if piece.result is None else None
