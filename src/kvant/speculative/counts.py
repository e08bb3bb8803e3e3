"""What became of drafts, counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counted since the engine was made.

    num_drafts: sequences that had drafts, summed over steps. num_draft_tokens, num_accepted_tokens:
    of all of them. accepted_per_position: how often the first, the second, .. draft stood.
    num_emitted_tokens: tokens that those steps gave, the target's own included. num_plain_steps:
    steps of answering sequences without any drafts. pays: whether steps draft now.
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
        """Tokens of a sequence in one step with drafts, the target's own included; 0 before any."""
        return self.num_emitted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def since(self, earlier: SpeculationStats) -> SpeculationStats:
        """What was counted after `earlier`."""
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
    """The counters behind `SpeculationStats`. num_positions: drafts of one sequence at most."""

    def __init__(self, num_positions: int) -> None:
        self._accepted_at = [0] * num_positions
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_emitted = 0
        self.num_plain_steps = 0

    def note(self, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """One sequence's step. num_accepted counts only drafts that became part of the answer."""
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
    """The counters under the names that dashboards know from vLLM, and Kvant's own beside them."""
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
