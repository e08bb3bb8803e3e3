"""A request that has not ended: its sequence, its text, and why it stops."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from kvant.engine.result import Progress, Result
from kvant.engine.stream import TokenStream
from kvant.engine.text import TextStream
from kvant.errors import RequestError
from kvant.sampling.logprobs import TokenLogprobs
from kvant.scheduling.request import FinishReason, Sequence


@dataclass(slots=True)
class Live:
    """text: None for a model without a tokenizer. error: why the request was refused, or None.

    stop_tokens: token ids that end its answer. is_simple: whether its tokens depend on logits alone, only
    a stop token or its length can end it, and it has neither a stream nor log-probabilities.
    """

    sequence: Sequence
    text: TextStream | None
    stop_tokens: frozenset[int]
    is_simple: bool = field(init=False)
    stop_reason: str | int | None = None
    error: RequestError | None = None
    stream: weakref.ref[TokenStream] | None = None  # weak: a stream that is dropped cancels

    def __post_init__(self) -> None:
        sequence = self.sequence
        self.is_simple = (
            (self.text is None or not self.text.may_end)
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
        """The result at its end. num_pages: pages it held."""
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
        )
