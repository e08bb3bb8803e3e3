"""A request and the state of its sequence, which stays with the request and not in a reused batch row."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from kvant.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvant.sampling.logit_rules import LogitRules
    from kvant.sampling.logprobs import TokenLogprobs


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
    """One request, as it was submitted. number: counts requests by arrival, unique in one engine.

    seed: the requested seed, or one drawn at arrival. salt: requests with different salts never share
    cached pages. max_total_tokens: the limit on prompt and answer together.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    salt: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state. Only the scheduler writes `token_ids` and `status`.

    token_ids: the prompt and the known part of the answer. held: page ids of each group, oldest token
    first; the scratch page replaces released pages. state_page: the page of its recurrent states, or -1.
    num_cached_tokens: prompt tokens that came from the prefix cache when it first ran. prefix_hashes: the
    root hash, then one hash per full page known so far. num_remembered_pages: how many of its first pages
    came from the prefix cache or were offered to it. own_hashes: hashes of pages that this sequence added
    to the cache. unconfirmed: (group, name, hash) of released pages, which are cached under a private name
    until a finite token follows the prompt. row: its row in the row table, or -1. order: of arrival at the
    scheduler. rules: changes to its logits. logprobs: of the answer's tokens. prompt_logprobs: of the
    prompt's second and later tokens, as far as known; None if not requested.
    """

    request: Request
    token_ids: list[int]
    prefix_hashes: list[bytes]
    status: Status = Status.WAITING
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    held: list[list[int]] = field(default_factory=list)
    state_page: int = -1
    own_hashes: list[bytes] = field(default_factory=list)
    unconfirmed: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    num_remembered_pages: int = 0
    row: int = -1
    order: int = -1
    rules: LogitRules | None = None
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None

    def __post_init__(self) -> None:
        if self.request.params.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True if the whole prompt still has to run, because log-probabilities of its tokens are missing."""
        found = self.prompt_logprobs
        return found is not None and len(found) < self.num_prompt_tokens - 1

    @property
    def is_plain(self) -> bool:
        """True if its next token is the most likely one: greedy, without rules or log-probabilities."""
        return self.request.params.is_greedy and not self.needs_host

    @property
    def needs_host(self) -> bool:
        """True if the host must choose its next token, because of rules or log-probabilities."""
        by_rules = self.rules is not None and self.rules.needs_host
        return by_rules or self.request.params.logprobs is not None

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def pages(self) -> list[int]:
        """Page ids of the first group; empty while it waits."""
        return self.held[0] if self.held else []

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
