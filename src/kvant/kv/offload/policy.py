"""When restoring pages beats computing them again."""

from __future__ import annotations

from collections.abc import Mapping

LEAST_TOKENS = 64
"""Fewer tokens are computed: a step has room for them, and a restore begins with a wait for it."""

LATENCY = 0.002
"""Seconds from the request of a restore until a step can use its pages, beside the copies themselves."""

PAGE_SECONDS = 30e-6
"""Seconds of the engine's thread for each restored page until they were measured."""

HOST_RATES = {"cpu": 4e9, "cuda": 20e9}
"""Bytes per second from host memory to a kind of device until copies were measured."""

_DISK_RATE = 0.5e9
"""The same for files; low, so that a first restore is no loss."""

_PEER_RATE = 1e9
"""The same for memory of other engines."""

_WEIGHT = 0.3
"""Share of the newest measurement in the smoothed rate."""


class BreakEven:
    """Compares bytes over the measured rate of a tier with tokens over the measured rate of prompts.

    least_tokens: fewer are never restored. latency: see LATENCY. host_rate: see HOST_RATES. The time of the
    engine's thread for each page counts too, since no step begins meanwhile. Attention
    over a long context makes the recomputation slower than this estimate: the rule errs on the side of
    computing.
    """

    def __init__(
        self,
        least_tokens: int = LEAST_TOKENS,
        latency: float = LATENCY,
        host_rate: float = HOST_RATES["cpu"],
    ) -> None:
        self.least_tokens, self.latency = least_tokens, latency
        self.bytes_per_second = {"host": host_rate, "disk": _DISK_RATE, "peer": _PEER_RATE}
        self.seconds_per_page = PAGE_SECONDS
        self._prompts = [0.0, 0.0]  # smoothed tokens and seconds of a step
        self._is_measured: set[str] = set()

    def note_copy(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Notes the measured time of a copy from a tier."""
        if num_bytes and seconds > 0:
            self.bytes_per_second[tier] = self._smoothed(
                tier, self.bytes_per_second[tier], num_bytes / seconds
            )

    def note_pages(self, num_pages: int, seconds: float) -> None:
        """The engine's thread took so long to restore pages, beside the copies themselves."""
        if num_pages:
            self.seconds_per_page = self._smoothed(
                "page", self.seconds_per_page, seconds / num_pages
            )

    def note_prompts(self, num_tokens: int, seconds: float) -> None:
        """Notes the measured time of a step that computed prompts."""
        if num_tokens >= self.least_tokens and seconds > 0:
            # Tokens and seconds apart: a step's tokens are read while the next step runs.
            for place, now in enumerate((num_tokens, seconds)):
                before = self._prompts[place]
                self._prompts[place] = before + _WEIGHT * (now - before) if before else now

    @property
    def tokens_per_second(self) -> float:
        """Speed of prompts, 0 before one was measured."""
        tokens, seconds = self._prompts
        return tokens / seconds if seconds else 0.0

    def pays(self, num_tokens: int, num_bytes: Mapping[str, int], num_pages: int) -> bool:
        """Whether restoring these bytes takes less time than computing the tokens whose K and V they are.

        num_bytes: by tier; "host": of all pages, which pass host memory; of the others those of pages that
        only they have. num_pages: how many these are. Before prompts were measured it always does.
        """
        if num_tokens < self.least_tokens:
            return False
        if not self.tokens_per_second:
            return True
        rates = self.bytes_per_second
        restore = self.latency + num_pages * self.seconds_per_page
        restore += sum(size / rates[tier] for tier, size in num_bytes.items())
        return restore < num_tokens / self.tokens_per_second

    def _smoothed(self, name: str, before: float, now: float) -> float:
        if name not in self._is_measured:
            self._is_measured.add(name)
            return now
        return before + _WEIGHT * (now - before)
