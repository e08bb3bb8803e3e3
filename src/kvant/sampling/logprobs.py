"""The log-probabilities that a request gets for a token. Without torch: the API process uses it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token. top: the most likely tokens as (token id, logprob), best first.

    rank: the token's place among all tokens by probability, 1 for the most likely.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
