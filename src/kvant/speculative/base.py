"""The protocol of a proposer, and the inputs of its methods.

Once in every step of the engine:

    propose   drafts up to k tokens for each sequence with one token to run
    (the target runs that token and the drafts)
    learn     reads the tokens that the target ran, and its hidden states
    (the engine decides which drafts are accepted)

A proposer with a KV cache of its own has its own plan and its own pool, indexed by the same page ids
as the target's: a page belongs to the same sequence in both. Layers of both that keep equally many tokens
have the same page table (`KVPool.group_of`, `Step.of`). `learn` is called for every step, including
prefills, recomputation after preemption and steps without drafts. So a page from the prefix cache holds
the proposer's state whenever it holds the target's keys and values. `learn` also gets rejected drafts: their
slots are written again before anything reads them, as in the target's pages. A proposer keeps nothing
about a sequence outside its pages, so the end, cancellation or preemption of a sequence needs no call.

A `DeviceProposer` drafts on the device, so that a whole step, including drafts and their verification, can
be one recorded launch.
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
    """A request for drafts of one sequence.

    token_ids: the prompt and the known part of the answer; the target has run all but the last token. held:
    its pages in each group (`kvant.kv.groups`), with room for len(token_ids) + num_tokens tokens; the scratch
    page stands for pages before a window. num_tokens: the most drafts wanted, at least 1.
    """

    token_ids: Sequence[int]
    held: Sequence[Sequence[int]]
    num_tokens: int

    @property
    def pages(self) -> Sequence[int]:
        """Page ids in the first group."""
        return self.held[0]


class Proposer(Protocol):
    """Drafts tokens. Its drafts can change the speed of an answer, but never its tokens."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Indices of the target's decoder layers whose outputs `learn` gets; empty for none."""
        ...

    def zero(self, pages: Sequence[int]) -> None:
        """Clears reallocated pages, before anything is written to them."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Returns the draft tokens of each sequence, in order; at most `num_tokens`, maybe none.

        Ids must be from the target's vocabulary.
        """
        ...

    def learn(self, step: Step, hidden: tuple[Tensor, ...]) -> None:
        """Updates the proposer's cache from a step of the target. Called only if there are taps.

        step: the target's step, on its device. hidden: the outputs of the decoder layers in `taps`,
        [T, hidden_size] each, in the compute dtype.
        """
        ...


@runtime_checkable
class DeviceProposer(Proposer, Protocol):
    """A proposer whose steps can be recorded: `draft` and `learn` run without copies to the host."""

    def draft(self, tokens: Tensor, step: Step) -> Tensor:
        """Returns [T] int64, the drafts at positions whose token is -1; other entries are undefined.

        tokens: [T] int64, for each sequence its newest token, then -1 for each draft. step: their positions
        and pages, as the target will run them.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """The drafter of a plan: its directory, config.json, geometry, facts and KV plan."""

    path: Path
    config: Mapping[str, Any]
    geometry: ModelGeometry
    facts: DraftFacts
    kv: KVPlan


@dataclass(frozen=True, slots=True)
class Setting:
    """The argument of a method's `build(setting)`, which makes a proposer.

    num_speculative_tokens: the most drafts of one sequence in one step. max_model_len: the most tokens of
    one sequence. pool: the target's pages, for a drafter that reads the target's keys and values; each
    layer's `LayerCache` knows the stored format, and target.plan the backend. draft: None for methods
    without a model. options: the method's own keys of the configuration. dummy_weights: use random weights
    for the drafter, for timings.
    """

    target: LoadedModel
    pool: KVPool
    num_speculative_tokens: int
    max_model_len: int
    draft: PlannedDraft | None
    options: Mapping[str, Any]
    dummy_weights: bool = False
