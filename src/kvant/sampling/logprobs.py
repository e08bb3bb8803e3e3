"""What a request is told about the probability of a token. No torch: the API process reads it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, and of the most likely ones as (token id, logprob), best first.

    rank: its place among all tokens, 1 for the most likely.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
