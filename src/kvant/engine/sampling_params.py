"""How one request wants its tokens chosen, checked once and frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvant.errors import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
_SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks beside its prompt. RequestError, naming the field, for a wrong value.

    Order of the filters: temperature, min_p, top_k, top_p; each acts on what the one before left.

    temperature: 0 takes the likeliest token (the smallest id among equals) and ignores the filters.
    top_k: keep the k likeliest tokens; 0 or -1 keeps all.
    top_p: keep the likeliest tokens that together reach this probability.
    min_p: keep tokens at least this fraction as likely as the likeliest.
    seed: with it the same request gives the same tokens at any time and in any company; None draws one.
    max_tokens: new tokens at most; None goes on to the end of the context.
    min_tokens: no end of any kind before so many new tokens.
    stop: strings that end the answer; they are not part of it unless include_stop_str_in_output.
    stop_token_ids: tokens that end the answer, beside the model's own end-of-sequence tokens.
    ignore_eos: an end-of-sequence token is emitted like any other and generation goes on.
    skip_special_tokens: leave special tokens out of the text (they stay in token_ids).
    logprobs: also report each token's log-probability and those of so many likeliest tokens, before
        temperature and filters; None reports nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        # Lists are friendly to write and tuples cannot change: the one conversion at the edge.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of(stop, str, "stop"))
        object.__setattr__(
            self, "stop_token_ids", _tuple_of(self.stop_token_ids, int, "stop_token_ids")
        )
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _count("top_k", self.top_k, -1)
        _count("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _count("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
                    param="min_tokens",
                )
        if self.seed is not None:
            _count("seed", self.seed, _SEEDS.start, _SEEDS.stop - 1)
        if self.logprobs is not None:
            _count("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} is {getattr(self, name)!r}, not True or False", param=name
                )
        _check_stops(self.stop_strings)
        if any(token < 0 for token in self.stop_token_ids):
            raise RequestError("stop_token_ids holds a negative id", param="stop_token_ids")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"{len(stops)} stop strings, at most {MAX_STOPS} are allowed", param="stop"
        )
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string has 1 to {MAX_STOP_CHARS} characters, not {len(text)}", param="stop"
            )


def _tuple_of(items: object, kind: type, name: str) -> tuple[object, ...]:
    if not isinstance(items, tuple | list):
        raise RequestError(f"{name} is a {type(items).__name__}, not a list", param=name)
    for item in items:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise RequestError(f"{name} holds {item!r}, which is no {kind.__name__}", param=name)
    return tuple(items)


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
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
