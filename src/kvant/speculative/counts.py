"""Counters of drafted and accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters since the engine's start.

    num_drafts: sequences with drafts, summed over steps. num_draft_tokens, num_accepted_tokens: their
    drafted and accepted tokens. accepted_per_position: how often the first, second, .. draft was accepted.
    num_emitted_tokens: tokens that these sequences got in those steps, including the target's own.
    num_plain_steps: decode steps without any drafts. pays: whether steps have drafts at present.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    num_plain_steps: int = 0
    pays: bool = True

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens per sequence and step with drafts, including the target's own; 0 before any."""
        return self.num_emitted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def since(self, earlier: SpeculationStats) -> SpeculationStats:
        """Returns the counts since `earlier`."""
        return SpeculationStats(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
            num_emitted_tokens=self.num_emitted_tokens - earlier.num_emitted_tokens,
            accepted_per_position=tuple(
                now - then
                for now, then in zip(
                    self.accepted_per_position, earlier.accepted_per_position, strict=True
                )
            ),
            num_plain_steps=self.num_plain_steps - earlier.num_plain_steps,
            pays=self.pays,
        )


class Counts:
    """The mutable counters of `SpeculationStats`. num_positions: the most drafts of one sequence."""

    def __init__(self, num_positions: int) -> None:
        self._accepted_at = [0] * num_positions
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_emitted = 0
        self.num_plain_steps = 0

    def note(self, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """Counts one sequence's step. num_accepted: drafts that became part of the answer."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        self._num_emitted += num_emitted
        for position in range(num_accepted):
            self._accepted_at[position] += 1

    def stats(self, *, pays: bool) -> SpeculationStats:
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(self._accepted_at),
            num_emitted_tokens=self._num_emitted,
            accepted_per_position=tuple(self._accepted_at),
            num_plain_steps=self.num_plain_steps,
            pays=pays,
        )


def spec_decode(stats: SpeculationStats) -> dict[str, Any]:
    """Returns the counters under the names that vLLM's dashboards use, and Kvant's own counters."""
    return {
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        "spec_decode_num_accepted_tokens_per_pos": list(stats.accepted_per_position),
        "spec_decode_mean_acceptance_length": stats.mean_acceptance_length,
        "spec_decode_acceptance_rate": stats.acceptance_rate,
        "spec_decode_num_plain_steps": stats.num_plain_steps,
        "spec_decode_pays": stats.pays,
    }
