"""Limits on what the server holds at once: running and waiting sequences, and waiting prompt tokens.

Places are counted before a body is tokenised or even read.
"""

from __future__ import annotations

import math
import time

from kvant.server.api_error import ApiError, bad_request, overloaded

QUEUE_SECONDS = 10.0
"""Without a token limit, waiting prompts may take this long at the measured speed."""
_MOST_RETRY_SECONDS = 60


class Admission:
    """capacity: sequences; set when the engine reports how many it runs. most_tokens: tokens of prompts
    without a first token; None allows QUEUE_SECONDS of them.
    """

    def __init__(self, most_tokens: int | None = None) -> None:
        self.capacity = 0
        self.held = 0
        self.queued_tokens = 0
        self.tokens_per_second = 0.0  # prompt tokens per second, from the engine; 0 if unknown
        self._most_tokens = most_tokens
        self._seconds_each = 0.0  # between two sequences that ended, smoothed
        self._last_end = 0.0

    @property
    def most_tokens(self) -> float:
        """Prompt tokens that may wait; infinite until the speed is known."""
        if self._most_tokens is not None:
            return self._most_tokens
        return self.tokens_per_second * QUEUE_SECONDS or math.inf

    def full(self) -> ApiError | None:
        """Return a 429 if not even one sequence of one token fits, else None."""
        if self.capacity and self.held >= self.capacity:
            return self._too_many()
        if self.queued_tokens and self.queued_tokens >= self.most_tokens:
            return self._too_long(1)
        return None

    def take(self, count: int) -> None:
        """Reserve `count` places; ApiError 429 if the server is full, 400 if it can never hold them."""
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
        """Reserve prompt tokens; ApiError 429 if too many wait. If none waits, any prompt is accepted."""
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
