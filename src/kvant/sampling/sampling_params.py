"""The parameters by which one request's tokens are chosen, checked once and then frozen.

`SamplingParams` declares every parameter once. The HTTP body, the message to the engine process and the
command line's flags are derived from its fields.
"""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvant.errors import RequestError
from kvant.sampling.structured_outputs import StructuredOutputs

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Param:
    """The declaration of one parameter, beside its type and default.

    help: one line of help. low, high: inclusive bounds; with above_low, `low` itself is refused.
    client_high: a lower upper bound for HTTP clients, as in OpenAI's API. from_model: a checkpoint's
    generation_config.json may set the default. has_flag: the commands that generate offer a flag.
    needs_text: only a model with a tokenizer can serve it. items: what a server calls its items in the error
    for too many (`Limits.items_of`). is_tokens: its items, or its keys, are token ids.
    """

    help: str
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    client_high: float | None = None
    from_model: bool = False
    has_flag: bool = False
    needs_text: bool = False
    items: str = ""
    is_tokens: bool = False


def _param(default: Any, help: str, **details: Any) -> Any:
    return field(default=default, metadata={"param": Param(help, **details)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's parameters beside its prompt. Raises RequestError, naming the field, for a wrong value.

    The order of application is: structured_outputs, allowed_token_ids, bad_words, logit_bias, min_tokens,
    repetition, frequency and presence penalty, temperature, min_p, top_k, top_p. Each step acts on the
    result of the step before it. All steps before temperature also affect greedy choices.

    n: number of answers to the prompt; see `choices`.
    temperature: 0 takes the likeliest token (the smallest id among equals) and ignores the filters.
    top_k: keeps the k likeliest tokens; 0 or -1 keeps all.
    top_p: keeps the likeliest tokens whose probabilities reach this sum.
    min_p: keeps tokens that are at least this fraction as likely as the likeliest one.
    presence_penalty: subtracted from the logit of every token that the answer already contains.
    frequency_penalty: the same, multiplied by the number of occurrences in the answer.
    repetition_penalty: divides positive logits and multiplies negative logits of tokens that the prompt
        or the answer contains; 1 changes nothing.
    seed: makes the same request return the same tokens in any batch. None draws a seed.
    max_tokens: maximum number of new tokens. None continues to the end of the context. 0 only computes
        the prompt, for prompt_logprobs or an embedding.
    min_tokens: minimum number of new tokens before the answer may end.
    stop: strings that end the answer. The text excludes them unless include_stop_str_in_output is set.
    stop_token_ids: tokens that end the answer, in addition to the model's end-of-sequence tokens.
    ignore_eos: treats end-of-sequence tokens like any other token.
    logit_bias: added to the logits of these token ids, from -100 to 100. A mapping, stored as pairs.
    bad_words: texts whose token sequences never appear in the answer, with or without a leading space.
    allowed_token_ids: the only tokens that an answer may contain. Without an end-of-sequence token among
        them, the answer continues to max_tokens.
    structured_outputs: the form of the answer. The answer ends when the form is complete, so it cannot be
        combined with min_tokens or ignore_eos.
    thinking_token_budget: the most tokens of thinking, without the marks around them. When they are used up,
        the tokens that end thinking are forced against all other parameters, and the answer goes on.
        -1 sets no limit. With a budget, also -1, structured_outputs begin behind the thinking. None does
        not look at thinking.
    skip_special_tokens: leaves special tokens out of the text; they remain in token_ids.
    logprobs: returns the log-probability of each token and of this many likeliest tokens, computed from
        the model's own logits. None returns nothing.
    prompt_logprobs: the same for the prompt's tokens; None for the first one. Such a request computes its
        whole prompt and takes nothing from the prefix cache.
    """

    n: int = _param(
        1,
        "Answers to each prompt; with --seed, answer i is drawn with SEED + i.",
        low=1,
        high=MAX_N,
        has_flag=True,
    )
    temperature: float = _param(
        1.0,
        "0 takes the most likely token.",
        low=0.0,
        client_high=2.0,
        from_model=True,
        has_flag=True,
    )
    top_k: int = _param(
        0,
        "Only the k most likely tokens.",
        low=-1,
        high=INT64 - 1,
        from_model=True,
        has_flag=True,
    )
    top_p: float = _param(
        1.0,
        "Only the most likely tokens that reach this probability together.",
        low=0.0,
        high=1.0,
        above_low=True,
        from_model=True,
        has_flag=True,
    )
    min_p: float = _param(
        0.0,
        "Only tokens at least this fraction as likely as the most likely one.",
        low=0.0,
        high=1.0,
        from_model=True,
        has_flag=True,
    )
    presence_penalty: float = _param(
        0.0,
        "Subtracted from logits of tokens in the answer, -2 to 2.",
        low=-2.0,
        high=2.0,
        has_flag=True,
    )
    frequency_penalty: float = _param(
        0.0,
        "The same, times the count of the token in the answer.",
        low=-2.0,
        high=2.0,
        has_flag=True,
    )
    repetition_penalty: float = _param(
        1.0,
        "Above 1 makes tokens of prompt and answer less likely.",
        low=0.01,
        high=100.0,
        from_model=True,
        has_flag=True,
    )
    seed: int | None = _param(
        None, "The same seed gives the same answer.", low=-INT64, high=INT64 - 1, has_flag=True
    )
    max_tokens: int | None = _param(16, "Maximum number of new tokens.", low=0)
    min_tokens: int = _param(0, "Minimum number of new tokens.", low=0)
    stop: str | Sequence[str] = _param(
        (),
        "End the answer before this text; may be repeated.",
        has_flag=True,
        needs_text=True,
        items="strings",
    )
    stop_token_ids: Sequence[int] = _param((), "Token ids that end the answer.", is_tokens=True)
    ignore_eos: bool = _param(False, "Continue after the end of the text.", has_flag=True)
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = _param(
        (),
        "Added to the logits of these token ids, -100 to 100.",
        low=-100,
        high=100,
        items="entries",
        is_tokens=True,
    )
    bad_words: Sequence[str] = _param(
        (), "Texts that the answer never contains.", needs_text=True, items="texts"
    )
    allowed_token_ids: Sequence[int] | None = _param(
        None, "The only tokens of the answer.", is_tokens=True
    )
    structured_outputs: StructuredOutputs | None = _param(  # noqa: RUF009
        None, "The form of the answer.", needs_text=True
    )
    thinking_token_budget: int | None = _param(
        None,
        "The most tokens of a reasoning model's thinking; -1 sets no limit.",
        low=-1,
        has_flag=True,
        needs_text=True,
    )
    skip_special_tokens: bool = _param(True, "Leave special tokens out of the text.")
    include_stop_str_in_output: bool = _param(False, "Keep the stop string in the text.")
    logprobs: int | None = _param(
        None, "Log-probabilities of this many likeliest tokens.", low=0, high=MAX_LOGPROBS
    )
    prompt_logprobs: int | None = _param(
        None, "The same for the tokens of the prompt.", low=0, high=MAX_LOGPROBS
    )

    def __post_init__(self) -> None:
        # Callers may pass lists; they are stored as tuples, which cannot change.
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
        self._check_scalars()
        self._check_lengths()
        _check_texts("stop", self.stop_strings, MAX_STOPS, MAX_STOP_CHARS)
        _check_texts("bad_words", self.bad_texts, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        for name, ids in self.token_ids.items():
            if any(token < 0 for token in ids):
                raise RequestError(f"{name} contains a negative id", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty", param="allowed_token_ids")
        self._check_structured()

    def _check_scalars(self) -> None:
        for name, check in _SCALARS:
            value = getattr(self, name)
            if value is not None or not check.optional:
                check(name, value)

    def _check_lengths(self) -> None:
        if self.max_tokens is None:
            return
        if self.max_tokens == 0 and self.n > 1:
            raise RequestError("n must be 1 when max_tokens is 0", param="n")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
                param="min_tokens",
            )

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
        """`stop` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def bad_texts(self) -> tuple[str, ...]:
        """`bad_words` as a tuple."""
        assert isinstance(self.bad_words, tuple)
        return self.bad_words

    @property
    def changes_logits(self) -> bool:
        """True if a parameter other than the form and the budget of thinking changes logits."""
        return bool(
            self.min_tokens > 0
            or self.bias_pairs
            or self.bad_texts
            or self.allowed_token_ids is not None
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of token id and value."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """All token ids in the parameters, by field, before a check against the vocabulary."""
        return {
            "stop_token_ids": tuple(self.stop_token_ids),
            "logit_bias": tuple(token for token, _ in self.bias_pairs),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
        }

    def choices(self, *, share_prompt: bool = True) -> tuple[SamplingParams, ...]:
        """Returns one set of parameters for each of the n answers.

        Answer i is drawn with seed + i, wrapped at 64 bits. The prompt's log-probabilities are the same
        for all answers, so only the first one computes them, unless share_prompt is False.
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
                    prompt_logprobs=None if share_prompt else self.prompt_logprobs,
                )
                for index in range(1, self.n)
            ),
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """(temperature, top_k or infinity, top_p, min_p); temperature 0 takes the most likely token."""
        if self.is_greedy:
            return 0.0, math.inf, 1.0, 0.0
        return (
            self.temperature,
            float(self.top_k) if self.top_k > 0 else math.inf,
            self.top_p,
            self.min_p,
        )


def seed_of_choice(seed: int, index: int) -> int:
    """Returns seed + index, wrapped at 64 bits."""
    return (seed + index + INT64) % (2 * INT64) - INT64


def _check_texts(name: str, texts: tuple[str, ...], most: int, most_chars: int) -> None:
    if len(texts) > most:
        raise RequestError(f"{name} has {len(texts)} texts; the limit is {most}", param=name)
    for text in texts:
        if not 0 < len(text) <= most_chars:
            raise RequestError(
                f"{name}: a text must have 1 to {most_chars} characters, not {len(text)}",
                param=name,
            )


def _bias(given: object) -> tuple[tuple[int, float], ...]:
    items = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(items, tuple | list):
        raise RequestError("logit_bias maps token ids to numbers", param="logit_bias")
    if len(items) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(items)} entries; the limit is {MAX_LOGIT_BIAS}",
            param="logit_bias",
        )
    found: dict[int, float] = {}
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise RequestError("logit_bias maps token ids to numbers", param="logit_bias")
        token, value = item
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"logit_bias: {token!r} is not a token id", param="logit_bias")
        _BIAS("logit_bias", value)
        found[token] = float(value)
    return tuple(sorted(found.items()))


def _tuple_of(items: object, kind: type, name: str) -> tuple[object, ...]:
    if not isinstance(items, tuple | list):
        raise RequestError(f"{name} is a {type(items).__name__}, not a list", param=name)
    for item in items:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise RequestError(
                f"{name} contains {item!r}, which is not a {kind.__name__}", param=name
            )
    return tuple(items)


@dataclass(frozen=True, slots=True)
class _Scalar:
    """The check of one number or switch. kind: bool, int or float."""

    kind: type
    optional: bool
    param: Param

    def __call__(self, name: str, value: object) -> None:
        """Raises RequestError, which names the field, for a value of another type or out of bounds."""
        if self.kind is bool:
            if not isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}, not True or False", param=name)
            return
        wanted = int if self.kind is int else int | float
        if (
            isinstance(value, bool)
            or not isinstance(value, wanted)
            # NaN, infinity, or an int beyond every float
            or (self.kind is float and not abs(value) <= sys.float_info.max)
        ):
            noun = "a whole number" if self.kind is int else "a number"
            raise RequestError(f"{name} is {value!r}, not {noun}", param=name)
        low, high, above = self.param.low, self.param.high, self.param.above_low
        if not low <= value <= high or (above and value == low):
            raise RequestError(
                f"{name} is {value}; it must be {_bounds(low, high, above)}", param=name
            )


def _bounds(low: float, high: float, above_low: bool) -> str:
    first, last = (x if isinstance(x, int) else f"{x:g}" for x in (low, high))
    if above_low:
        return f"above {first} and at most {last}"
    return f"at least {first}" if high == math.inf else f"between {first} and {last}"


PARAMS: Mapping[str, Param] = {one.name: one.metadata["param"] for one in fields(SamplingParams)}
"""Every parameter's declaration, by name."""

TYPES: Mapping[str, Any] = typing.get_type_hints(SamplingParams)
"""Every parameter's type, by name."""


def scalar_type(name: str) -> type | None:
    """Returns bool, int or float, the type of a parameter that may also be None; None for other types."""
    for kind in (bool, int, float):
        if TYPES[name] in (kind, kind | None):
            return kind
    return None


_SCALARS = tuple(
    (name, _Scalar(kind, TYPES[name] != kind, param))
    for name, param in PARAMS.items()
    if (kind := scalar_type(name)) is not None
)
_BIAS = _Scalar(float, False, PARAMS["logit_bias"])

EMBEDDING = SamplingParams(temperature=0, max_tokens=0)
"""The parameters of every request to an engine that embeds."""
