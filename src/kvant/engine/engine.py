"""The loop: requests in, tokens and text out, one step at a time.

    submit -> [schedule -> zero new pages -> build the batch -> run -> sample -> append, finish] -> ...

Nothing here runs by itself: whoever holds the engine calls `step` until nothing is left. Between two
steps any request can be cancelled.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence as Items
from dataclasses import dataclass

from tokenizers import Tokenizer

from kvant.engine.batch import build_batch
from kvant.engine.request import FinishReason, Request, Sequence
from kvant.engine.result import EngineStats, Progress, Result
from kvant.engine.runner import Runner
from kvant.engine.sampler import Sampled, sample
from kvant.engine.sampling_params import SamplingParams
from kvant.engine.scheduler import Chunk, Scheduler, SchedulerLimits
from kvant.engine.stream import TokenStream
from kvant.engine.text import TextStream
from kvant.errors import EngineFault, RequestError
from kvant.kv.pages import PageAllocator, root_hash


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What cached pages are pages of: see `kvant.kv.pages.root_hash`."""

    model: str
    revision: str | None
    plan_fingerprint: str


@dataclass(slots=True)
class _Live:
    """A request in the engine: its sequence and its text."""

    sequence: Sequence
    text: TextStream | None
    stop_reason: str | int | None = None
    stream: weakref.ref[TokenStream] | None = None  # weak: a stream that is dropped cancels

    def tell(self, piece: Progress) -> None:
        stream = None if self.stream is None else self.stream()
        if stream is not None:
            stream.put(piece)


class Engine:
    """Runs requests on one model.

    num_pages: of the runner's pool, the scratch page counted. seed: of the seeds of requests that
    bring none; with it a run of the same requests in the same order can be repeated.
    """

    def __init__(
        self,
        runner: Runner,
        limits: SchedulerLimits,
        num_pages: int,
        *,
        identity: CacheIdentity,
        vocab_size: int,
        eos_token_ids: Items[int] = (),
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
    ) -> None:
        self.runner = runner
        self.limits = limits
        self.scheduler = Scheduler(limits, PageAllocator(num_pages))
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._identity = identity
        self._random = random.Random(seed)
        self._live: dict[int, _Live] = {}
        self._next_number = 0
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        allocator = self.scheduler.allocator
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_held_pages=allocator.num_held,
            num_idle_pages=allocator.num_idle,
            num_usable_pages=allocator.num_usable,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_preemptions=self._num_preemptions,
        )

    def submit(
        self, prompt_token_ids: Items[int], params: SamplingParams, *, salt: str = ""
    ) -> int:
        """Queue a request; returns its number. RequestError, with the numbers, if it cannot be served.

        salt: only requests of the same salt share cached pages.
        """
        prompt = tuple(prompt_token_ids)
        self._check(prompt, params)
        number = self._next_number
        self._next_number += 1
        drawn = self._random.getrandbits(
            63
        )  # drawn always: others' seeds do not depend on this one's
        limit = self.limits.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        seed = drawn if params.seed is None else params.seed
        request = Request(number, prompt, params, seed, limit, salt)
        root = root_hash(
            salt=salt,
            model=self._identity.model,
            revision=self._identity.revision,
            plan_fingerprint=self._identity.plan_fingerprint,
        )
        sequence = Sequence(request, list(prompt), [root])
        self._live[number] = _Live(sequence, self._text_stream(request))
        self.scheduler.add(sequence)
        return number

    def cancel(self, number: int) -> Result | None:
        """End a request now; its pages are free at once. None if it has ended already."""
        live = self._live.get(number)
        if live is None:
            return None
        result = self._finish(live, FinishReason.CANCELLED)
        live.tell(Progress(number, (), "", result))
        return result

    def step(self) -> list[Progress]:
        """Run once; what became of every request that got a token or ended.

        If the forward fails its requests are cancelled, then the fault is raised: the engine itself
        stays sound.
        """
        schedule = self.scheduler.schedule()
        if not schedule.chunks:
            return []
        self._num_preemptions += len(schedule.preempted)
        try:
            sampled = self._run(schedule.chunks, schedule.pages_to_zero)
        except BaseException:
            for chunk in schedule.chunks:
                self.cancel(chunk.sequence.number)
            raise
        self._num_steps += 1
        progress = []
        tokens = iter(sampled)
        for chunk in schedule.chunks:
            self._num_computed_tokens += chunk.num_tokens
            samples = chunk.samples
            token = next(tokens) if samples else None
            if token is None or token.token_id is not None:
                # Before the token is appended, and never if it is none: nothing that computed NaN is
                # to be found by others.
                self.scheduler.advance(chunk)
            if token is not None:
                live = self._live[chunk.sequence.number]
                progress.append(self._take(live, token))
                live.tell(progress[-1])
        return progress

    def stream(self, number: int) -> TokenStream:
        """The progress of a request that was submitted and has not run yet. Others advance beside it."""
        live = self._live[number]
        stream = TokenStream(self.step, lambda: self.cancel(number))
        live.stream = weakref.ref(stream)
        return stream

    def audit(self) -> None:
        """Recompute all ownership of pages from scratch. EngineFault with every finding."""
        faults = self.scheduler.audit()
        if set(self._live) != {s.number for s in self.scheduler.sequences()}:
            faults.append("the engine's requests are not the scheduler's")
        if faults:
            raise EngineFault("the page audit found:\n  " + "\n  ".join(faults))

    # -- requests ------------------------------------------------------------------------------

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError(
                "the prompt is empty: there is nothing to go on from", param="prompt"
            )
        limit = self.limits.max_model_len
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with a first new one that is more than the "
                f"{limit} tokens a sequence may have here (--max-model-len, and what the pool holds)",
                param="prompt",
            )
        for name, tokens in (("prompt", prompt), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise RequestError(f"{name} holds {token!r}, which is no token id", param=name)
                if not 0 <= token < self.vocab_size:
                    raise RequestError(
                        f"{name} holds token {token}; ids go from 0 to {self.vocab_size - 1}",
                        param=name,
                    )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this model has none", param="stop"
            )

    def _text_stream(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(
            self.tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=request.params.skip_special_tokens,
            stops=request.params.stop_strings,
            include_stop=request.params.include_stop_str_in_output,
        )

    # -- one step ------------------------------------------------------------------------------

    def _run(self, chunks: list[Chunk], pages_to_zero: list[int]) -> list[Sampled]:
        if pages_to_zero:
            self.runner.zero(pages_to_zero)
        batch = build_batch(chunks, self.scheduler.page_table, self.limits.page_size)
        logits = self.runner.run(batch)
        return sample(logits, batch.sampled, self.eos_token_ids)

    def _take(self, live: _Live, sampled: Sampled) -> Progress:
        """Append a token, show its text, and end the request where it ends."""
        sequence, number = live.sequence, live.sequence.number
        if sampled.token_id is None:
            result = self._finish(live, FinishReason.NUMERICAL_ERROR)
            return Progress(number, (), "", result)
        token = sampled.token_id
        sequence.token_ids.append(token)
        if sampled.logprobs is not None:
            sequence.logprobs.append(sampled.logprobs)
        params = sequence.request.params
        long_enough = sequence.num_output_tokens > params.min_tokens
        text = ""
        reason: FinishReason | None = None
        if long_enough and self._ends(token, live):
            reason = FinishReason.STOP
        elif live.text is not None:
            text = live.text.push(token, may_stop=long_enough)
            if live.text.stopped_by is not None:
                live.stop_reason = live.text.stopped_by
                reason = FinishReason.STOP
        if reason is None and sequence.num_tokens >= sequence.request.max_total_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return Progress(number, (token,), text)
        before = "" if live.text is None else live.text.text
        result = self._finish(live, reason)
        return Progress(number, (token,), text + result.text[len(before) :], result)

    def _ends(self, token: int, live: _Live) -> bool:
        params = live.sequence.request.params
        if token in params.stop_token_ids:
            live.stop_reason = token
            return True
        return token in self.eos_token_ids and not params.ignore_eos

    def _finish(self, live: _Live, reason: FinishReason) -> Result:
        if live.text is not None:
            live.text.finish()
        sequence = live.sequence
        num_pages = len(sequence.pages)
        self.scheduler.finish(sequence, reason)
        del self._live[sequence.number]
        logprobs = None if sequence.request.params.logprobs is None else tuple(sequence.logprobs)
        return Result(
            number=sequence.number,
            prompt_token_ids=sequence.request.prompt_token_ids,
            token_ids=tuple(sequence.output_token_ids),
            text="" if live.text is None else live.text.text,
            finish_reason=reason,
            stop_reason=live.stop_reason,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            num_pages=num_pages,
            num_preemptions=sequence.num_preemptions,
            logprobs=logprobs,
        )
