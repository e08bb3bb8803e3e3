"""The protocol of a proposer, and what it is given.

Once in every step of the engine:

    propose   for each sequence with one token to run: up to k tokens that may follow it
    (the target runs that token and the drafts)
    learn     what the target ran, and its hidden states
    (the engine decides which drafts are accepted)

A proposer with a KV cache of its own has its own plan and its own pool, indexed by the same page ids
as the target's: a page belongs to the same sequence in both. Layers of both that keep equally many tokens
have the same page table (`KVPool.group_of`, `Step.of`). `learn` is called for every step, also
for prefills, recomputation after preemption and steps without drafts. So a page from the prefix cache
holds the proposer's state whenever it holds the target's keys and values. Rejected drafts are learnt
like accepted ones: their slots are written again before anything reads them, as in the target's pages.
A proposer keeps nothing about a sequence outside its pages, so ends, cancellation and preemption need
no call.

A `DeviceProposer` drafts from tensors to tensors, so that a whole step, drafts and their verification
included, can be one recorded launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvant.attention.base import Step
from kvant.kv.geometry import ModelGeometry
from kvant.kv.pool import KVPool
from kvant.kv.spec import KVPlan
from kvant.models.geometry import DraftFacts
from kvant.models.loaded import LoadedModel


@dataclass(frozen=True, slots=True)
class Ask:
    """A sequence that wants drafts.

    token_ids: everything known; the target has run all but the last. held: its pages in each group of
    pages (`kvant.kv.groups`), with room for len(token_ids) + num_tokens tokens; the scratch page stands for
    pages behind a window. num_tokens: drafts that can be used, at least 1.
    """

    token_ids: Sequence[int]
    held: Sequence[Sequence[int]]
    num_tokens: int

    @property
    def pages(self) -> Sequence[int]:
        """Its pages in the first group."""
        return self.held[0]


class Proposer(Protocol):
    """Drafts tokens. Nothing that it proposes can change an answer, only how fast it comes."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Decoder layers of the target whose output it reads; empty for none."""
        ...

    def zero(self, pages: Sequence[int]) -> None:
        """Clear pages that have a new owner, before anything is written to them."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Drafts for each, likeliest continuation first to last; as many as asked, or fewer.

        Ids must be of the target's vocabulary.
        """
        ...

    def learn(self, step: Step, hidden: tuple[Tensor, ...]) -> None:
        """Learn from a step of the target; called if there are taps.

        step: the target's own, on its device. hidden: the outputs of the decoder layers in `taps`,
        [T, hidden_size] each.
        """
        ...


@runtime_checkable
class DeviceProposer(Proposer, Protocol):
    """A proposer whose steps can be recorded: `draft` and `learn` never copy to the host."""

    def draft(self, tokens: Tensor, step: Step) -> Tensor:
        """Return the most likely token at every position without one, [T] int64; other entries are undefined.

        tokens: [T] int64, per sequence its newest token, then -1 for each draft.
        step: their positions, as the target will run them.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A drafter as it was planned: its directory, config.json, shape and storage."""

    path: Path
    config: Mapping[str, Any]
    geometry: ModelGeometry
    facts: DraftFacts
    kv: KVPlan


@dataclass(frozen=True, slots=True)
class Setting:
    """What a method's `build(setting)` makes a proposer from.

    num_speculative_tokens: drafts of one sequence in one step at most. max_model_len: tokens of one
    sequence at most. pool: the target's pages, to be read by a drafter that shares the target's keys
    and values: each layer's `LayerCache` knows the format its owner writes, and target.plan its
    backend. draft: None for methods without a model. options: the method's own keys of the
    configuration. dummy_weights: read none of the drafter's, for timings.
    """

    target: LoadedModel
    pool: KVPool
    num_speculative_tokens: int
    max_model_len: int
    draft: PlannedDraft | None
    options: Mapping[str, Any]
    dummy_weights: bool = False
