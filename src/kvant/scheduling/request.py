"""A request and its life. Everything about a request stays with it, never in a recycled batch row."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from kvant.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvant.sampling.logit_rules import LogitRules


class FinishReason(StrEnum):
    """Why a request ended; the values are what users and clients see."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    CANCELLED = "cancelled"
    NUMERICAL_ERROR = "numerical_error"  # NaN or Inf in its logits
    REFUSED = "refused"  # found impossible after it was submitted: `Result.error` says why


class Status(Enum):
    WAITING = "waiting"  # holds no pages
    RUNNING = "running"
    FINISHED = "finished"  # holds no pages


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked. number: order of arrival, unique in one engine.

    seed: the seed that is used, the asked one or one drawn at arrival. salt: requests of different
    salts never share cached pages. max_total_tokens: prompt and answer together end here at the latest.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, and of the likeliest ones as (token id, logprob), best first.

    rank: its place among all tokens, 1 for the likeliest.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state.

    token_ids: prompt and answer so far. num_computed_tokens: how many of them have their K and V in
    `pages`; the rest is still to be run. num_cached_tokens: prompt tokens that came from the prefix
    cache when it first ran. prefix_hashes: root hash, then one hash for each full page known so far.
    num_remembered_pages: its first pages that were offered to the prefix cache, or came from there.
    own_hashes: of the pages that it brought into the cache itself. is_followed: whether a token followed
    all that was computed, so that its pages are known to hold numbers. row: its row in the page table, -1
    without. order: of arrival at the scheduler. rules: what it changes in its logits. prompt_logprobs:
    of the prompt's second token and all after it, as far as they are known; None if nobody asked.
    """

    request: Request
    token_ids: list[int]
    prefix_hashes: list[bytes]
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    own_hashes: list[bytes] = field(default_factory=list)
    num_remembered_pages: int = 0
    is_followed: bool = False
    row: int = -1
    order: int = -1
    rules: LogitRules | None = None
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    _wants_likeliest: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.request.params
        self._wants_likeliest = params.is_greedy and params.logprobs is None
        if self.request.params.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Its prompt has to be run, all of it, for the log-probabilities of its tokens."""
        found = self.prompt_logprobs
        return found is not None and len(found) < self.num_prompt_tokens - 1

    @property
    def is_plain(self) -> bool:
        """Whether its next token is the likeliest and nothing else is asked about it."""
        return self._wants_likeliest and self.rules is None

    @property
    def is_drawn_alone(self) -> bool:
        """Whether its next token needs nothing but logits and its place: the likeliest, or drawn."""
        return self.rules is None and self.request.params.logprobs is None

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]
