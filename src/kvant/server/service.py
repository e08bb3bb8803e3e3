"""Runs requests inside the server: admits them, tokenises, submits sequences and delivers their events.

A full server refuses a request before its body is read. Admission counts running and waiting sequences, and
waiting prompt tokens.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvant.engine.text import Tokenizing, TooManyTokens
from kvant.errors import RequestError
from kvant.plan.settings import Settings
from kvant.sampling.generation_defaults import recommended_params
from kvant.sampling.logprobs import TokenLogprobs
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.thinking import thinking_marks
from kvant.server.api_error import (
    ApiError,
    api_error_of,
    as_api_error,
    bad_request,
    overloaded,
    unavailable,
)
from kvant.server.config import ServerConfig
from kvant.server.fill import FillForm, fill_form
from kvant.server.messages import Failure, Loading, Piece, Ready, Report
from kvant.server.metrics import Activity, Metrics
from kvant.server.parameters import read_template_values
from kvant.server.reply import Tools, reply_format
from kvant.server.requests import (
    Conversation,
    Facts,
    Generation,
    Prompt,
    check_length,
    check_prompt_logprobs,
    check_task,
    renamed,
    strict_form,
)
from kvant.server.store import ResponseStore
from kvant.server.supervisor import Channel, Event, State, Supervisor
from kvant.server.template import Render, Renderer, open_tokenizer

QUEUE_SECONDS = 10.0
"""Without a token limit, waiting prompts may take this many seconds at the measured speed."""
_MOST_RETRY_SECONDS = 60


class Admission:
    """Counts the places of a server. capacity: places for sequences, set when the engine is ready. held:
    places in use. queued_tokens: tokens of prompts without a first token. most_tokens: their limit; None
    allows what the engine computes in QUEUE_SECONDS.
    """

    def __init__(self, most_tokens: int | None = None) -> None:
        self.capacity = 0
        self.held = 0
        self.queued_tokens = 0
        self.tokens_per_second = 0.0  # prompt tokens per second, from the engine; 0 if unknown
        self._most_tokens = most_tokens
        self._seconds_each = 0.0  # smoothed time between the ends of two sequences
        self._last_end = 0.0

    @property
    def most_tokens(self) -> float:
        """Prompt tokens that may wait; infinite until the speed is known."""
        if self._most_tokens is not None:
            return self._most_tokens
        return self.tokens_per_second * QUEUE_SECONDS or math.inf

    def full(self) -> ApiError | None:
        """Returns an ApiError 429 if not even one sequence of one token fits, else None."""
        if self.capacity and self.held >= self.capacity:
            return self._too_many()
        if self.queued_tokens and self.queued_tokens >= self.most_tokens:
            return self._too_long(1)
        return None

    def take(self, count: int) -> None:
        """Reserves `count` places. Raises ApiError 429 if the server is full, 400 if they never fit."""
        if count > self.capacity:
            raise bad_request(
                f"the request asks for {count} sequences at once; this server holds at most "
                f"{self.capacity} (--max-num-seqs and --max-num-queued-reqs)",
                "prompt",
            )
        if self.held + count > self.capacity:
            raise self._too_many()
        self.held += count

    def take_tokens(self, count: int) -> None:
        """Reserves prompt tokens. Raises ApiError 429 if too many wait; if none wait, accepts any number."""
        if self.queued_tokens and self.queued_tokens + count > self.most_tokens:
            raise self._too_long(count)
        self.queued_tokens += count

    def give_back_tokens(self, count: int) -> None:
        self.queued_tokens -= count

    def give_back(self, count: int) -> None:
        self.held -= count
        now = time.monotonic()
        if self._last_end:
            each = min((now - self._last_end) / count, _MOST_RETRY_SECONDS)
            self._seconds_each += 0.2 * (each - self._seconds_each)
        self._last_end = now

    @property
    def retry_after(self) -> int:
        """Estimated seconds until half of the held sequences have ended."""
        return _bounded(self._seconds_each * self.held / 2)

    def _too_many(self) -> ApiError:
        return overloaded(
            f"this server holds {self.held} sequences and at most {self.capacity}; try again",
            retry_after=self.retry_after,
        )

    def _too_long(self, count: int) -> ApiError:
        speed = self.tokens_per_second
        return overloaded(
            f"prompts of {self.queued_tokens} tokens wait here, {count} more are too many "
            f"(at most {self.most_tokens:.0f}); try again",
            retry_after=_bounded(self.queued_tokens / 2 / speed if speed else 1.0),
        )


def _bounded(seconds: float) -> int:
    return max(1, min(_MOST_RETRY_SECONDS, math.ceil(seconds)))


@dataclass(slots=True)
class Sequence:
    """One answer of a request so far. index: its place among the choices.

    queued_tokens: prompt tokens counted by admission until the first token; 0 for further answers to a
    prompt, which find it in the cache. token_ids, logprobs, prompt_logprobs: collected so far, see `Piece`.
    begun: a part was sent. num_logprob_chars: characters of tokens already sent with log-probabilities.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    queued_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    begun: bool = False
    num_logprob_chars: int = 0
    ended: Piece | None = None


@dataclass(slots=True)
class Running:
    """A request in the engine. The caller of `Service.open` must close it.

    sequences: by id, in the order of the choices, `copies` of each prompt. deadline: on `time.monotonic`.
    open_ids: sequences that have not ended. rendered: the conversation as text, if `ReplyReader` needs it.
    is_enough: set by a writer that needs no more tokens.
    """

    sequences: dict[int, Sequence]
    copies: int
    channel: Channel
    deadline: float
    num_prompt_tokens: int
    started: float
    last_event: float
    open_ids: set[int]
    counted: dict[str, object]
    first_token: float = 0.0
    rendered: str = ""
    is_enough: bool = False


class Service:
    """The endpoints' common work without HTTP. say: prints a line for the user.

    on_ready, on_loading: see `Supervisor`.
    """

    def __init__(
        self,
        config: ServerConfig,
        settings: Settings,
        metrics: Metrics,
        say: Callable[[str], None],
        *,
        on_ready: Callable[[Ready], None],
        on_loading: Callable[[Loading], None],
    ) -> None:
        self.config = config
        self.supervisor = Supervisor(
            settings,
            config.restarts,
            on_ready=on_ready,
            on_loading=on_loading,
            on_report=self.note_report,
        )
        self.metrics = metrics
        self.say = say
        self.admission = Admission(config.max_queued_tokens)
        self.renderer = Renderer(config.limits.template_seconds)
        self.responses = ResponseStore(config.limits.stored_responses, config.limits.stored_bytes)
        self.activity = Activity()
        self.draining = False
        self.started = int(time.time())
        self.tokenizing: Tokenizing | None = None
        self.facts: Facts | None = None
        self._salt_key = json.dumps(config.api_keys).encode()

    def set_ready(self, ready: Ready) -> None:
        """Takes over the facts of an engine that has started. The tokenizer is read only once."""
        queued = self.config.max_queued
        self.admission.capacity = ready.max_num_seqs + (
            4 * ready.max_num_seqs if queued is None else queued
        )
        if self.facts is None:
            path = Path(ready.path)
            self.tokenizing = open_tokenizer(path)
            if self.tokenizing is not None and (own := self.config.own_template) is not None:
                self.tokenizing.tokenizer.chat_template = own
            template = self._template()
            self.facts = Facts(
                names=self.config.served_names,
                max_model_len=ready.max_model_len,
                vocab_size=ready.vocab_size,
                has_tokenizer=self.tokenizing is not None,
                defaults=recommended_params(path)
                if self.config.model_defaults
                else SamplingParams(),
                template=template,
                template_values=read_template_values(self.config.default_chat_template_kwargs),
                reply=None if template is None else reply_format(template),
                thinks=self.tokenizing is not None
                and thinking_marks(self.tokenizing.backend, ready.vocab_size) is not None,
                infill=self._infill(),
                pooling=ready.pooling,
            )

    def _infill(self) -> FillForm | None:
        if self.tokenizing is None:
            return None
        backend = self.tokenizing.backend
        return fill_form(lambda mark: backend.token_to_id(mark) is not None)

    def _template(self) -> str | None:
        if self.tokenizing is None or not self.tokenizing.has_chat_template:
            return None
        try:
            return self.tokenizing.tokenizer.get_chat_template()
        except ValueError:  # there are several templates and no default
            return None

    def note_report(self, before: Report, report: Report) -> None:
        """Updates metrics and admission. report: the engine's new report. before: the one before it."""
        self.metrics.stepped(before, report)
        self.admission.tokens_per_second = report.prompt_tokens_per_second

    @property
    def alive(self) -> bool:
        """True if the engine is ready."""
        return self.supervisor.state is State.READY and self.facts is not None

    @property
    def accepting(self) -> bool:
        return self.alive and not self.draining

    @property
    def ready(self) -> Ready:
        """The engine's `Ready` message. Use only after the engine was ready once."""
        assert self.supervisor.ready is not None
        return self.supervisor.ready

    def require(self) -> Facts:
        """Returns the model's facts. Raises ApiError 503 while nothing can be generated."""
        if self.draining:
            raise unavailable("this server is shutting down", code="draining")
        if not self.alive or self.facts is None:
            state = self.supervisor.state.value
            raise unavailable(f"the engine is {state}", code=f"engine_{state}")
        return self.facts

    def refuse_if_full(self) -> None:
        """Raises ApiError 503 or 429 if no request could run now."""
        self.require()
        if fault := self.admission.full():
            raise fault

    def salt_of(self, key: str | None, asked: str) -> str:
        """Returns the salt of cached pages, so that only equal API keys with equal salts share pages."""
        if key is None:
            return asked
        return hmac.new(self._salt_key, f"{key}\0{asked}".encode(), "sha256").hexdigest()

    async def open(
        self, generation: Generation, *, key: str | None, counted: dict[str, object]
    ) -> Running:
        """Reserves a place, tokenises and submits. The caller must `close` the result.

        counted: gets the request's numbers when it is closed.
        """
        facts = self.require()
        check_task(generation, facts)
        self.admission.take(generation.num_sequences)
        queued = 0
        try:
            prompts, rendered = await self.tokenise(generation, facts)
            self.require()  # the engine may have died meanwhile
            if generation.tools is not None and generation.tools.is_strict:
                generation = await asyncio.to_thread(
                    self._with_form, generation, generation.tools, rendered, facts
                )
                self.require()
            num_tokens = sum(map(len, prompts))
            self.admission.take_tokens(num_tokens)
            queued = num_tokens
            salt = self.salt_of(key, generation.salt)
            running = self._submit(generation, prompts, salt, counted)
            running.rendered = rendered if generation.reads_reply else ""
            self.activity.opened(running)
            return running
        except BaseException:
            self.admission.give_back(generation.num_sequences)
            self.admission.give_back_tokens(queued)
            raise

    def _with_form(
        self, generation: Generation, tools: Tools, rendered: str, facts: Facts
    ) -> Generation:
        token_id = self._with_tokenizer("tools").backend.token_to_id
        otherwise = generation.sampling.structured_outputs
        form = strict_form(tools, rendered, token_id, facts, self.config.limits, otherwise)
        sampling = replace(generation.sampling, structured_outputs=form)
        return replace(generation, sampling=sampling)

    async def events(self, running: Running) -> AsyncIterator[list[tuple[Sequence, Piece]] | None]:
        """Yields the waiting pieces, or None after ping_seconds of silence, for a ping to the client. Raises
        ApiError if a sequence fails, the request's time is over or the client reads too slowly.
        """
        limits, channel = self.config.limits, running.channel
        silent_until = time.monotonic() + limits.ping_seconds
        while running.open_ids and not running.is_enough:
            if channel.overflowed:
                raise ApiError(
                    503, "the answer was not read", type="server_error", code="slow_reader"
                )
            events = channel.take()
            now = time.monotonic()
            if events:
                yield [self._note(running, event, now) for event in events]
            elif now >= running.deadline:
                raise ApiError(
                    503,
                    f"the request took longer than {limits.request_seconds:g} s",
                    type="server_error",
                    code="request_timeout",
                )
            elif now >= silent_until:
                yield None
            else:
                await channel.wait(min(silent_until, running.deadline))
                continue
            silent_until = time.monotonic() + limits.ping_seconds

    def close(self, running: Running) -> None:
        """Cancels sequences that still run, frees the request's places and updates the counters."""
        if running.open_ids:
            self.supervisor.cancel(running.open_ids)
            self.metrics.aborted.inc(len(running.open_ids))
        running.channel.close()
        self.activity.closed(running)
        sequences = running.sequences.values()
        running.counted |= {
            "prompt": running.num_prompt_tokens,
            "cached": sum(s.ended.num_cached_tokens for s in sequences if s.ended is not None),
            "new": sum(len(s.token_ids) for s in sequences),
        }
        if running.first_token:
            running.counted["first"] = f"{running.first_token - running.started:.3f}"
        self.admission.give_back(len(running.sequences))
        for sequence in running.sequences.values():
            self._left_queue(sequence)

    def _left_queue(self, sequence: Sequence) -> None:
        self.admission.give_back_tokens(sequence.queued_tokens)
        sequence.queued_tokens = 0

    async def tokenise(
        self, generation: Generation, facts: Facts
    ) -> tuple[list[tuple[int, ...]], str]:
        """Returns the prompts as token ids, and the rendered conversation or "". Raises ApiError."""
        talk, rendered = generation.conversation, ""
        name = generation.source
        try:
            if talk is not None:
                special = generation.special_tokens is True
                tokens, rendered = await self.encode_chat(
                    talk, most=facts.max_model_len, special=special
                )
                found = [tokens]
            else:
                found = await asyncio.to_thread(self._encode_all, generation, facts.max_model_len)
        except TooManyTokens as fault:
            check_length(fault.count, generation, name, facts)
            raise
        except RequestError as fault:
            raise renamed(as_api_error(fault), {"messages": name}) from None
        for tokens in found:
            check_length(len(tokens), generation, name, facts)
        check_prompt_logprobs(found, generation, self.config.limits.prompt_logprobs)
        return found, rendered

    def _encode_all(self, generation: Generation, most: int) -> list[tuple[int, ...]]:
        """Tokenises all prompts. Runs in a thread, since the library releases the interpreter lock."""
        special = generation.special_tokens is not False
        return [self._encode(prompt, most, special) for prompt in generation.prompts]

    def _encode(self, prompt: Prompt, most: int, special: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        tokenizing = self._with_tokenizer("prompt")
        return tuple(tokenizing.encode(prompt, add_special_tokens=special, most=most))

    async def encode_chat(
        self, talk: Conversation, *, most: int | None = None, special: bool = False
    ) -> tuple[tuple[int, ...], str]:
        """Returns a conversation as token ids and as text, rendered by the model's template.

        special: the tokenizer adds its special tokens to the template's. Raises TooManyTokens above `most`.
        """
        tokenizing = self._with_tokenizer("messages")
        tokenizing.require_chat_template()
        template = None if self.facts is None else self.facts.template
        if template is None:
            raise bad_request("this model's chat templates have no default", "messages")
        variables = {**tokenizing.tokenizer.special_tokens_map, **talk.variables}
        text = await self.renderer.render(
            Render(
                template,
                talk.messages,
                variables,
                talk.add_generation_prompt,
                talk.continue_final_message,
                talk.tools,
            )
        )
        tokens = await asyncio.to_thread(
            tokenizing.encode_rendered, text, add_special_tokens=special, most=most
        )
        return tuple(tokens), text

    def _with_tokenizer(self, param: str) -> Tokenizing:
        if self.tokenizing is None:
            raise bad_request("this model has no tokenizer: give token ids as a prompt", param)
        return self.tokenizing

    def _submit(
        self,
        generation: Generation,
        prompts: list[tuple[int, ...]],
        salt: str,
        counted: dict[str, object],
    ) -> Running:
        # In a stream each answer computes its own prompt_logprobs, so that none waits for another answer.
        choices = generation.sampling.choices(share_prompt=not generation.stream)
        work = [(prompt, sampling) for prompt in prompts for sampling in choices]
        channel = Channel(self.config.limits.stream_buffer_bytes)
        ids = self.supervisor.submit(work, salt, channel)
        sequences = {}
        for index, id in enumerate(ids):
            prompt = work[index][0]
            sequences[id] = Sequence(index, prompt, 0 if index % generation.n else len(prompt))
        now = time.monotonic()
        self.metrics.submitted(generation, [len(prompt) for prompt in prompts])
        return Running(
            sequences,
            generation.n,
            channel,
            now + self.config.limits.request_seconds,
            sum(len(prompt) for prompt in prompts),
            now,
            now,
            set(ids),
            counted,
        )

    def _note(self, running: Running, event: Event, now: float) -> tuple[Sequence, Piece]:
        sequence = running.sequences[event.id]
        if isinstance(event, Failure):
            running.open_ids.discard(event.id)
            self.metrics.failed(event.kind)
            raise api_error_of(event)
        if sequence.queued_tokens:
            self._left_queue(sequence)
        if not sequence.token_ids:
            self.metrics.first_token.observe(now - running.started)
            running.first_token = running.first_token or now
        else:
            self.metrics.next_token.observe(now - running.last_event)
        running.last_event = now
        sequence.token_ids += event.token_ids
        self.activity.generated += len(event.token_ids)
        sequence.logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            sequence.prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is not None:
            running.open_ids.discard(event.id)
            sequence.ended = event
            self.metrics.finished(
                event.finish_reason.value,
                seconds=now - running.started,
                prompt_tokens=len(sequence.prompt_token_ids),
                cached_tokens=event.num_cached_tokens,
                tokens=len(sequence.token_ids),
            )
            if event.times is not None:
                self.metrics.timed(event.times, len(sequence.token_ids))
            if not running.open_ids:
                longest = max(len(s.token_ids) for s in running.sequences.values())
                self.metrics.longest_answer.observe(longest)
        return sequence, event
