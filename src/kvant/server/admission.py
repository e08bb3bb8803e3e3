"""How many sequences the server holds at once, running and waiting. Counted before anything is tokenised."""

from __future__ import annotations

import math
import time

from kvant.server.api_error import bad_request, overloaded

_MOST_RETRY_SECONDS = 60


class Admission:
    """capacity: sequences, set once the engine has said how many it runs."""

    def __init__(self) -> None:
        self.capacity = 0
        self.held = 0
        self._seconds_each = 0.0  # between two sequences that ended, smoothed
        self._last_end = 0.0

    def take(self, count: int) -> None:
        """Reserve; ApiError 429 if the server is full, 400 if it can never hold so many."""
        if count > self.capacity:
            raise bad_request(
                f"the request asks for {count} sequences at once; this server holds at most "
                f"{self.capacity} (--max-num-seqs and --max-num-queued-reqs)",
                "prompt",
            )
        if self.held + count > self.capacity:
            raise overloaded(
                f"this server holds {self.held} sequences and at most {self.capacity}; try again",
                retry_after=self.retry_after,
            )
        self.held += count

    def give_back(self, count: int) -> None:
        self.held -= count
        now = time.monotonic()
        if self._last_end:
            each = min((now - self._last_end) / count, _MOST_RETRY_SECONDS)
            self._seconds_each += 0.2 * (each - self._seconds_each)
        self._last_end = now

    @property
    def retry_after(self) -> int:
        """Seconds until half of what is held now should have ended."""
        estimate = math.ceil(self._seconds_each * self.held / 2)
        return max(1, min(_MOST_RETRY_SECONDS, estimate))
