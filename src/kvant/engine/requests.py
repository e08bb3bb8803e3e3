"""Requests from submission to end: checks them, compiles grammars, appends each step's tokens, ends them."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer

from kvant.engine.result import Progress, Result
from kvant.engine.text import TextStream
from kvant.errors import RequestError
from kvant.execution.batch import Launched, Outcome
from kvant.sampling.logit_rules import make_rules
from kvant.sampling.logprobs import TokenLogprobs
from kvant.sampling.sampler import RowRequest, RowSampler, Sampled, greedy, token_logprobs
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import CompileLimits
from kvant.sampling.thinking import NO_THINKING, UNLIMITED, ThinkingMarks
from kvant.scheduling.request import FinishReason, Sequence, Status
from kvant.scheduling.scheduler import Schedule, Scheduler
from kvant.speculative.accept import verify

if TYPE_CHECKING:
    from kvant.sampling.grammar import Compiling, GrammarCompiler

_WAIT_SECONDS = 0.02
_log = logging.getLogger(__name__)

Sample = Callable[[int], Sampled]
"""Maps the index of a row of a step's logits to the token sampled from it."""

# Makes a Progress from a tuple of all its fields, without the Python call of its constructor.
_progress = partial(tuple.__new__, Progress)


def check_request(
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
    has_tokenizer: bool,
    has_forms: bool,
    has_thinking: bool,
) -> None:
    """Raises RequestError, with the values and the client's field name, if a request cannot be served."""
    if not prompt:
        raise RequestError("the prompt is empty: there is nothing to go on from", param="prompt")
    new = 0 if params.max_tokens == 0 else 1
    if len(prompt) + new > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; with {new} new that is more than the "
            f"{max_model_len} tokens a sequence may have here (--max-model-len, and what the pool holds)",
            param="prompt",
        )
    for name, tokens in {"prompt": prompt, **params.token_ids}.items():
        if (
            set(map(type, tokens)) <= {int}
            and 0 <= min(tokens, default=0) <= max(tokens, default=0) < vocab_size
        ):
            continue  # five times as fast as the loop below, which finds the wrong token
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"{name} holds {token!r}, which is no token id", param=name)
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} holds token {token}; ids go from 0 to {vocab_size - 1}", param=name
                )
    if params.stop_strings and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer, and this model has none", param="stop")
    form = params.structured_outputs
    if form is not None and not has_forms:
        raise RequestError(
            f"{form.asked_as} needs a tokenizer and an end-of-sequence token; this model lacks one",
            param=form.asked_as,
        )
    if params.thinking_token_budget not in (None, UNLIMITED) and not has_thinking:
        raise RequestError(NO_THINKING, param="thinking_token_budget")
    if params.n != 1:
        raise RequestError(f"n is {params.n}, but this call gives one answer", param="n")


class TokenStream(Iterator[Progress]):
    """Yields what each step adds to one request; steps the engine when nothing is there yet.

    Every step of the engine fills all streams, so several streams can be read in turn without loss. The
    last piece carries the result; a refused request raises its RequestError instead. Closing or dropping
    the stream cancels an unfinished request.
    """

    def __init__(self, step: Callable[[], object], close: Callable[[], object]) -> None:
        self._step = step
        self._close = close
        self._pieces: deque[Progress] = deque()
        self._ended = False

    def put(self, piece: Progress) -> None:
        """Adds a piece; the engine calls this."""
        self._pieces.append(piece)

    def __next__(self) -> Progress:
        if self._ended:
            raise StopIteration
        try:
            while not self._pieces:
                self._step()
        except BaseException:
            self.close()
            raise
        piece = self._pieces.popleft()
        if piece.result is not None:
            self._ended = True
            if piece.result.error is not None:
                raise piece.result.error
        return piece

    def close(self) -> None:
        """Cancels the request if it has not finished; nothing more is yielded."""
        if not self._ended:
            self._ended = True
            self._close()

    def __del__(self) -> None:
        self.close()


@dataclass(slots=True)
class Live:
    """A request that has not ended. text: None for a model without a tokenizer.

    stop_tokens: token ids that end its answer. error: why it was refused, or None. is_simple: its tokens
    depend on logits alone, only a stop token or its length can end it, and it needs no log-probabilities
    and no stream. hidden: an embedding request's last hidden state, as bytes of float32.
    """

    sequence: Sequence
    text: TextStream | None
    stop_tokens: frozenset[int]
    is_simple: bool = field(init=False)
    stop_reason: str | int | None = None
    error: RequestError | None = None
    hidden: bytes | None = None
    stream: weakref.ref[TokenStream] | None = None  # weak: a stream that is dropped cancels

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.is_simple = (
            (self.text is None or not self.text.may_end)
            and sequence.rules is None
            and not sequence.needs_host
            and sequence.request.params.structured_outputs is None  # its rules come once compiled
            and sequence.prompt_logprobs is None
        )

    @property
    def number(self) -> int:
        return self.sequence.number

    @property
    def shown(self) -> str:
        """The answer's text so far."""
        return "" if self.text is None else self.text.text

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry per prompt token; None if not requested or not complete."""
        found = self.sequence.prompt_logprobs
        return None if found is None or self.sequence.lacks_prompt_logprobs else (None, *found)

    def tell(self, piece: Progress) -> None:
        stream = None if self.stream is None else self.stream()
        if stream is not None:
            stream.put(piece)

    def advance(self, token: int) -> tuple[str, FinishReason | None]:
        """Returns the text that the newest token adds, and why the answer ends there, or None."""
        sequence = self.sequence
        params, rules = sequence.request.params, sequence.rules
        long_enough = sequence.num_output_tokens > params.min_tokens
        if long_enough and token in self.stop_tokens:
            if token in params.stop_token_ids:
                self.stop_reason = token
            return "", FinishReason.STOP
        if rules is not None:
            rules.advance(token)
        text = ""
        if self.text is not None:
            text = self.text.push(token, may_stop=long_enough)
            if self.text.stopped_by is not None:
                self.stop_reason = self.text.stopped_by
                return text, FinishReason.STOP
        if rules is not None and rules.is_complete:
            return text, FinishReason.STOP
        if sequence.num_tokens >= sequence.request.max_total_tokens:
            return text, FinishReason.LENGTH
        return text, None

    def result(self, reason: FinishReason, num_pages: int) -> Result:
        """Returns the request's result when it ends. num_pages: pages it held."""
        if self.text is not None:
            self.text.finish()
        sequence = self.sequence
        logprobs = None if sequence.request.params.logprobs is None else tuple(sequence.logprobs)
        return Result(
            number=sequence.number,
            prompt_token_ids=sequence.request.prompt_token_ids,
            token_ids=tuple(sequence.output_token_ids),
            text=self.shown,
            finish_reason=reason,
            stop_reason=self.stop_reason,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            num_pages=num_pages,
            num_preemptions=sequence.num_preemptions,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
            hidden=self.hidden,
        )


class Forms:
    """Compiles grammars of structured output. They need a tokenizer and an end-of-sequence token.

    marks: of the model's thinking, which a form may wait for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Collection[int],
        limits: CompileLimits,
        marks: ThinkingMarks | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._limits = limits
        self._compiler: GrammarCompiler | None = None
        self._waiting: dict[int, tuple[Sequence, Compiling]] = {}  # by the request's number

    @property
    def can_be_asked(self) -> bool:
        return self._tokenizer is not None and bool(self._eos)

    @property
    def numbers(self) -> set[int]:
        """Numbers of the requests whose grammar is being compiled."""
        return set(self._waiting)

    def prepare(self) -> None:
        """Prepares the tokenizer now instead of with the first such request."""
        if self.can_be_asked:
            why = self._compiling().prepare()
            if why:
                _log.warning("requests for structured outputs are refused: %s", why)

    def start(self, sequence: Sequence) -> None:
        """Starts to compile the grammar of a sequence's request."""
        form = sequence.request.params.structured_outputs
        assert form is not None
        self._waiting[sequence.number] = sequence, self._compiling().start(form)

    def take(self, *, patiently: bool) -> list[tuple[Sequence, RequestError | None]]:
        """Returns sequences whose compilation ended, each with None or the error that refused its grammar.

        A sequence without an error now has its rules; the caller must end the others. patiently: wait up
        to _WAIT_SECONDS for the first one.
        """
        if not self._waiting:
            return []
        if patiently:
            futures = [compiling for _, compiling in self._waiting.values()]
            wait(futures, timeout=_WAIT_SECONDS, return_when=FIRST_COMPLETED)
        taken = []
        for sequence, compiling in tuple(self._waiting.values()):
            if compiling.done():
                fault = self._give_rules(sequence, compiling)
                taken.append((sequence, fault))
                if fault is None:
                    del self._waiting[sequence.number]
        return taken

    def cancel(self, number: int) -> bool:
        """Stops waiting for a request's grammar. Returns False if the request was not waiting."""
        found = self._waiting.pop(number, None)
        if found is None:
            return False
        found[1].cancel()
        return True

    def _give_rules(self, sequence: Sequence, compiling: Compiling) -> RequestError | None:
        request = sequence.request
        form = request.params.structured_outputs
        assert form is not None
        try:
            sequence.rules = make_rules(
                request.params,
                request.prompt_token_ids,
                eos_token_ids=self._eos,
                tokenizer=self._tokenizer,
                grammar=compiling.result(),
                marks=self._marks,
            )
        except RequestError as fault:
            return fault
        except Exception:
            _log.exception("%s of request %d failed to compile", form.asked_as, request.number)
            return RequestError(f"{form.asked_as} cannot be used", param=form.asked_as)
        return None

    def _compiling(self) -> GrammarCompiler:
        if self._compiler is None:
            # Imported late: its library takes time to import, and timings do not need it.
            from kvant.sampling.grammar import GrammarCompiler

            assert self._tokenizer is not None
            self._compiler = GrammarCompiler(
                self._tokenizer, self._vocab_size, self._eos, limits=self._limits
            )
        return self._compiler


class LiveRequests:
    """All requests that have not ended. Appends each step's tokens to them, and ends them.

    by_number: every request from its submission to its end, also while its grammar is compiled.
    embeds: the rows of a step are hidden states, not logits.
    """

    def __init__(self, scheduler: Scheduler, forms: Forms, *, embeds: bool = False) -> None:
        self._scheduler = scheduler
        self._embeds = embeds
        self._forms = forms
        self.by_number: dict[int, Live] = {}
        self._batch: _Batch | None = None

    def cancel(self, number: int) -> Result | None:
        """Ends a request now; its pages are free at once. Returns None if it has ended already."""
        live = self.by_number.get(number)
        if live is None:
            return None
        result = self._finish(live, FinishReason.CANCELLED)
        live.tell(Progress(number, (), "", result))
        return result

    def note_stream(self) -> None:
        """Must be called after a request got a stream: its batch may no longer take `_commit_plain`."""
        self._batch = None

    def commit(self, launched: Launched) -> tuple[list[Progress], Outcome, list[list[int]]]:
        """Waits for a step and appends its tokens to the sequences.

        Returns the requests' progress, the outcome, and the tokens that each sequence got. The last list
        is empty if every sequence got exactly the one token of its row.
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
        """Appends one token to every sequence if that is all that the step does; else returns None.

        With a thousand sequences, a loop that checks each one would be most of a step's host time.
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
        """Appends the step's tokens sequence by sequence. Returns the progress and each sequence's tokens."""
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
        """Returns a function that maps a row of the step's logits to its token."""
        if self._embeds:
            return lambda row: Sampled(
                outcome.tokens[row] if outcome.sound[row] else None, hidden=launched.logits[row]
            )
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
        """Stores log-probabilities of prompt tokens. Returns sequences whose logits are not finite."""
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
            # A preempted sequence computes its entries again: they replace the old ones.
            sequence.prompt_logprobs[first:] = token_logprobs(rows, followers, num_top)
        return broken

    def _follow(self, sequence: Sequence, sampled: Sampled) -> Progress:
        """Gives a sequence its sampled token, or ends it if there is none, and feeds its stream."""
        if sampled.token_id is not None or sampled.error is not None:
            # Only with a token or an error: without one the pages may hold NaN and must not be shared.
            self._scheduler.follow(sequence)
        live = self.by_number[sequence.number]
        piece = self._take(live, sampled)
        if live.stream is not None:
            live.tell(piece)
        return piece

    def _take(self, live: Live, sampled: Sampled) -> Progress:
        """Appends a token to a request and decodes its text; ends the request if the token ends it."""
        sequence, number = live.sequence, live.sequence.number
        first = sequence.num_output_tokens == 0
        if sampled.error is not None:
            return self.refuse(live, sampled.error)
        if sampled.token_id is None:
            result = self._finish(live, FinishReason.NUMERICAL_ERROR)
            return Progress(number, (), "", result)
        prompt_logprobs = live.prompt_logprobs if first else None
        if sequence.num_tokens == sequence.request.max_total_tokens:  # max_tokens 0
            if sampled.hidden is not None:
                live.hidden = sampled.hidden.to("cpu", torch.float32).numpy().tobytes()
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
            if sequence.rules is not None:
                self._scheduler.note_rules(sequence)
            return Progress(number, (token,), text, None, logprobs, prompt_logprobs)
        before = live.shown
        result = self._finish(live, reason)
        text += result.text[len(before) :]
        return Progress(number, (token,), text, result, logprobs, prompt_logprobs)

    def refuse(self, live: Live, fault: RequestError) -> Progress:
        """Ends a request as refused."""
        live.error = fault
        return Progress(live.number, (), "", self._finish(live, FinishReason.REFUSED))

    def _finish(self, live: Live, reason: FinishReason) -> Result:
        num_pages = len(live.sequence.pages)
        self._forms.cancel(live.number)
        self._scheduler.finish(live.sequence, reason)
        del self.by_number[live.number]
        return live.result(reason, num_pages)


class _Batch:
    """Lists for `_commit_plain`, one entry per sequence of a step. Reused while the sequences stay the same.

    is_simple: `Live.is_simple` holds for every sequence.
    """

    def __init__(self, sequences: list[Sequence], lives: dict[int, Live]) -> None:
        self.sequences = sequences
        found = [live for s in sequences if (live := lives.get(s.number)) is not None]
        self.is_simple = len(found) == len(sequences) and all(live.is_simple for live in found)
        self.numbers = [live.number for live in found]
        self.appends = [live.sequence.token_ids.append for live in found]
        self.texts = [live.text for live in found if live.text is not None]  # all of them, or none
        self.stop_tokens = frozenset().union(*(live.stop_tokens for live in found))


def _goes_on_with(piece: Progress) -> int | None:
    """Returns the last token of a piece, after which the sequence goes on; None if the piece ended it."""
    return piece.token_ids[-1] if piece.result is None else None
