"""How one request wants its tokens chosen, checked once and frozen."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvant.errors import RequestError
from kvant.sampling.structured_outputs import StructuredOutputs

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
_SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks beside its prompt. RequestError, naming the field, for a wrong value.

    Order: structured_outputs, allowed_token_ids, bad_words, logit_bias, min_tokens, repetition,
    frequency and presence penalty (all of them act on greedy choices too), then temperature, min_p,
    top_k, top_p; each acts on what the one before left.

    n: answers to the one prompt; see `choices`.
    presence_penalty: taken off the logit of every token that the answer has already.
    frequency_penalty: the same, times how often the answer has it.
    repetition_penalty: positive logits of tokens that prompt or answer have are divided by it, negative
        ones multiplied; 1 changes nothing.
    temperature: 0 takes the likeliest token (the smallest id among equals) and ignores the filters.
    top_k: keep the k likeliest tokens; 0 or -1 keeps all.
    top_p: keep the likeliest tokens that together reach this probability.
    min_p: keep tokens at least this fraction as likely as the likeliest.
    seed: with it the same request gives the same tokens at any time and in any company; None draws one.
    max_tokens: new tokens at most; None goes on to the end of the context. 0 only computes the prompt,
        and needs prompt_logprobs.
    min_tokens: no end of any kind before so many new tokens.
    stop: strings that end the answer; they are not part of it unless include_stop_str_in_output.
    stop_token_ids: tokens that end the answer, beside the model's own end-of-sequence tokens.
    logit_bias: added to the logits of these token ids, from -100 to 100. A mapping, kept as pairs.
    bad_words: texts whose tokens the answer never has in a row, with a space before them or without.
    allowed_token_ids: the only tokens an answer may have. Without an end-of-sequence token among them
        it goes on to max_tokens.
    structured_outputs: the form that the answer must have. It ends when it is complete, and cannot be
        combined with min_tokens or ignore_eos, which contradict that.
    ignore_eos: an end-of-sequence token is emitted like any other and generation goes on.
    skip_special_tokens: leave special tokens out of the text (they stay in token_ids).
    logprobs: also report each token's log-probability and those of so many likeliest tokens, as the
        model has them, before anything above acts; None reports nothing.
    prompt_logprobs: the same for the tokens of the prompt, None for the first of them. Such a request
        computes its whole prompt and takes nothing from the prefix cache; others find what it computed.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] | list[str] = ()
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # Lists are friendly to write and tuples cannot change: the one conversion at the edge.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of(stop, str, "stop"))
        object.__setattr__(
            self, "stop_token_ids", _tuple_of(self.stop_token_ids, int, "stop_token_ids")
        )
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _tuple_of(self.bad_words, str, "bad_words"))
        if self.allowed_token_ids is not None:
            allowed = _tuple_of(self.allowed_token_ids, int, "allowed_token_ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
        self._check_numbers()
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} is {getattr(self, name)!r}, not True or False", param=name
                )
        _check_texts("stop", self.stop_strings, MAX_STOPS, MAX_STOP_CHARS)
        _check_texts("bad_words", self.bad_texts, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        for name, ids in self.token_ids.items():
            if any(token < 0 for token in ids):
                raise RequestError(f"{name} holds a negative id", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids allows nothing", param="allowed_token_ids")
        self._check_structured()

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _count("n", self.n, 1, MAX_N)
        _count("top_k", self.top_k, -1, 2**63 - 1)
        _count("min_tokens", self.min_tokens, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _count("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0)
            if self.max_tokens == 0 and self.n > 1:
                raise RequestError("n answers of no tokens make no sense", param="n")
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
                    param="min_tokens",
                )
        if self.seed is not None:
            _count("seed", self.seed, _SEEDS.start, _SEEDS.stop - 1)

    def _check_structured(self) -> None:
        asked = self.structured_outputs
        if asked is None:
            return
        if not isinstance(asked, StructuredOutputs):
            raise RequestError(
                f"structured_outputs is a {type(asked).__name__}, not StructuredOutputs",
                param="structured_outputs",
            )
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} contradicts {asked.asked_as}: an answer ends when its form is complete",
                    param=name,
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def bad_texts(self) -> tuple[str, ...]:
        """`bad_words`, always a tuple."""
        assert isinstance(self.bad_words, tuple)
        return self.bad_words

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of token id and value."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Every token id that the parameters name, by field: whoever knows the vocabulary checks them."""
        return {
            "stop_token_ids": tuple(self.stop_token_ids),
            "logit_bias": tuple(token for token, _ in self.bias_pairs),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
        }

    def choices(self) -> tuple[SamplingParams, ...]:
        """One set of parameters for each of the n answers.

        Answer i is drawn with seed + i, wrapped at 64 bits. The prompt's log-probabilities are the
        same for all, so only the first computes them.
        """
        first = replace(self, n=1)
        if self.n == 1:
            return (first,)
        return (
            first,
            *(
                replace(
                    first,
                    seed=None if self.seed is None else seed_of_choice(self.seed, index),
                    prompt_logprobs=None,
                )
                for index in range(1, self.n)
            ),
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def seed_of_choice(seed: int, index: int) -> int:
    """The seed of answer `index` of a request with this seed: seed + index, wrapped at 64 bits."""
    return (seed + index + 2**63) % 2**64 - 2**63


def _check_texts(name: str, texts: tuple[str, ...], most: int, most_chars: int) -> None:
    if len(texts) > most:
        raise RequestError(f"{name}: {len(texts)} texts, at most {most} are allowed", param=name)
    for text in texts:
        if not 0 < len(text) <= most_chars:
            raise RequestError(
                f"{name}: a text has 1 to {most_chars} characters, not {len(text)}", param=name
            )


def _bias(given: object) -> tuple[tuple[int, float], ...]:
    items = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(items, tuple | list):
        raise RequestError("logit_bias maps token ids to numbers", param="logit_bias")
    if len(items) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(items)} entries, at most {MAX_LOGIT_BIAS} are allowed",
            param="logit_bias",
        )
    found: dict[int, float] = {}
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise RequestError("logit_bias maps token ids to numbers", param="logit_bias")
        token, value = item
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"logit_bias: {token!r} is no token id", param="logit_bias")
        _number("logit_bias", value, -100.0, 100.0)
        found[token] = float(value)
    return tuple(sorted(found.items()))


def _tuple_of(items: object, kind: type, name: str) -> tuple[object, ...]:
    if not isinstance(items, tuple | list):
        raise RequestError(f"{name} is a {type(items).__name__}, not a list", param=name)
    for item in items:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise RequestError(f"{name} holds {item!r}, which is no {kind.__name__}", param=name)
    return tuple(items)


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= sys.float_info.max  # NaN, infinity, or an int beyond every float
    ):
        raise RequestError(f"{name} is {value!r}, not a number", param=name)
    if not low <= value <= high or (above_low and value == low):
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        if above_low:
            bounds = f"above {low:g} and at most {high:g}"
        raise RequestError(f"{name} is {value}; it must be {bounds}", param=name)


def _count(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}, not a whole number", param=name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} is {value}; it must be {bounds}", param=name)
