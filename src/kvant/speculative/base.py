"""The protocol of a proposer, and what it is given.

Once in every step of the engine:

    propose   for each sequence with one token to run: up to k tokens that may follow it
    (the target runs that token and the drafts; the engine decides which of them stand)
    learn     what the target ran, its hidden states, and which rows stand

A proposer with a KV cache of its own has its own plan and its own pool, indexed by the same page ids
as the target's: whoever holds a page holds it in both. `learn` is called for every step, prefills,
recomputation after preemption and steps without drafts included, so that whatever a proposer keeps
in a page is there whenever the target's keys and values are: a page from the prefix cache carries
both. A proposer keeps nothing about a sequence outside its pages; ends, cancellation and preemption
therefore need no call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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

    token_ids: everything known; the target has run all but the last. pages: its pages, with room
    for len(token_ids) + num_tokens tokens. num_tokens: drafts that can be used, at least 1.
    """

    token_ids: Sequence[int]
    pages: Sequence[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Verified:
    """A step that the target ran.

    step: the target's own. hidden: for each of the proposer's `taps` what that decoder layer handed
    on, [T, hidden_size]. kept: [n] int64, the rows of T whose tokens stand; None where all do.
    """

    step: Step
    hidden: tuple[Tensor, ...]
    kept: Tensor | None = None


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

    def learn(self, verified: Verified) -> None:
        """The target ran a step. Rejected tokens' slots will be written again."""
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
    configuration.
    """

    target: LoadedModel
    pool: KVPool
    num_speculative_tokens: int
    max_model_len: int
    draft: PlannedDraft | None
    options: Mapping[str, Any]
