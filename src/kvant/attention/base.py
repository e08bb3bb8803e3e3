"""The metadata of one forward step, and the protocol of a backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvant.kv.pool import KVPool, LayerCache
from kvant.kv.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class LongQuery:
    """A sequence of a step with many query tokens; all fields are host integers.

    sequence: its place in the step. first_token: its first query's place in T. length: tokens in
    the cache after this step's are written, the num_tokens of this step among them.
    """

    sequence: int
    first_token: int
    num_tokens: int
    length: int

    @property
    def is_new(self) -> bool:
        """True if no token of it was stored before this step."""
        return self.num_tokens == self.length


@dataclass(frozen=True, slots=True)
class Step:
    """One forward over packed sequences. It is passed as an argument and is never global.

    The sequences of a step are concatenated in the token dimension T.
    cu_seqlens_q: [num_seqs + 1] int32, offsets of each sequence's query tokens in T.
    seqlens_kv: [num_seqs] int32, tokens in the cache after this step's are written.
    page_table: [num_seqs, max_pages] int32, page ids; entries past the sequence's end are unread.
    slot_mapping: [T] int64, page * page_size + offset to write each token to; -1 writes nowhere.
    positions: [T] int64, rotary positions.
    max_seqlen_q, max_seqlen_kv: host copies of the largest lengths.
    causal: query i of a sequence with n queries sees keys up to seqlen_kv - n + i; otherwise all.
    long: the last sequences, if they have LONG queries or more, for backends that treat them
    differently; `rest` holds the sequences before them (None if there are none).
    wanted: the step of the queries whose logits are wanted alone, with their sequences, for a last
    layer whose other rows are not used; None if they are not listed, or if all are wanted.
    lists: what a backend computed from the lengths in one layer, for later layers. A step whose lengths
    change in place, as between replays of a graph, gets a new Step when it is recorded.
    slices: likewise, steps for parts of the queries, by their first token and end.
    kept: likewise, anything else.
    rows: [num_seqs] int64, the rows in which the sequences keep their states (`StatePool`); of padding, the
    scratch row. None for a model without states.
    lengths: query tokens of each sequence on the host; None if each has one, or if no layer asks.
    draft_states: where the states behind a sequence's drafts go, the first of consecutive places for each
    sequence; -1 for one without drafts. None for a step without drafts, or for a model without states.
    others: the same step through the page tables of the second and later groups of pages; see `of`.
    page_table, slot_mapping and what holds them are those of the first group.
    """

    cu_seqlens_q: Tensor
    seqlens_kv: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    positions: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    causal: bool = True
    long: tuple[LongQuery, ...] = ()
    rest: Step | None = None
    wanted: Step | None = None
    rows: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    draft_states: tuple[int, ...] | None = None
    others: tuple[Step, ...] = ()
    lists: dict[Hashable, Tensor] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    slices: dict[tuple[int, int], Step] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    kept: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def of(self, group: int) -> Step:
        """The step through the page table of a group of pages (`kvant.kv.groups`)."""
        return self.others[group - 1] if group else self


def through(step: Step, others: Sequence[tuple[Tensor, Tensor]]) -> Step:
    """Return the step with the page tables and slots of the second and later groups.

    others: of each such group, page_table [num_seqs, max_pages] and slot_mapping [T], as in `Step`.
    """
    if not others:
        return step
    found = tuple(
        replace(step, page_table=table, slot_mapping=slots, others=()) for table, slots in others
    )
    return replace(step, others=found)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of a layer's attention beside the cache.

    scale: factor on q.k. window: tokens a query sees, itself included, None for all (a bidirectional
    query sees window - 1 tokens to either side). softcap: 0 for none. sinks: [num_q_heads] logits or
    None.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """Writes rows into pages and attends over decoded pages."""

    name: str

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Encode k [T, num_kv_heads, head_dim_k] and v [T, num_kv_heads, head_dim_v] into their slots.

        v: None for latents, whose rows of K are all that is stored.
        """
        ...

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """q [T, num_q_heads, head_dim_k] -> [T, num_q_heads, head_dim_v], over stored bytes only."""
        ...


Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Keys [m, heads, head_dim] and values [m, heads, head_dim_v] of stored rows [m, width] of latents."""


@runtime_checkable
class ExpandingBackend(Protocol):
    """A backend that attends to keys and values made of latents, for queries of `Step.long`."""

    def expands(self, q: Tensor) -> bool:
        """Whether it does for such queries, [T, num_q_heads, head_dim]."""
        ...

    def attend_expanded(
        self,
        cache: LayerCache,
        q: Tensor,
        out: Tensor,
        step: Step,
        params: AttentionParams,
        expand: Expand,
    ) -> None:
        """Fill the rows of `step.long` in out [T, num_q_heads, head_dim_v]: q over expanded stored rows."""
        ...


class HeadNorm(Enum):
    """How an RMS norm of a head rounds, and what it multiplies with."""

    ROUNDED = "w * cast(x^)"
    WIDE = "cast(w * x^)"
    ONE = "cast((1 + w) * x^)"


@dataclass(frozen=True, slots=True)
class HeadRotation:
    """Norm and rotation of the heads of q and k before attention.

    cos, sin: [.., R / 2] for pairs (a, b) of a head's first R numbers -> (a cos - b sin, b cos + a sin),
    by position or, without by_position, by token of the step. R may be 0. q_weight, k_weight: [head_dim],
    weights of an RMS norm of every head before the rotation, or None. neighbours: pairs are 2 i and
    2 i + 1, else i and i + R / 2. gated: each head of q is followed by one of gates, which is passed over.
    """

    cos: Tensor
    sin: Tensor
    by_position: bool
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    norm: HeadNorm = HeadNorm.ROUNDED
    neighbours: bool = False
    gated: bool = False


@runtime_checkable
class RotatingWriter(Protocol):
    """A backend that also norms and rotates heads before it writes."""

    def write_rotated(
        self, cache: LayerCache, qkv: Tensor, rotation: HeadRotation, step: Step
    ) -> Tensor:
        """Return rotated q [T, num_q_heads, head_dim] of qkv [T, (num_q_heads + 2 num_kv_heads) * head_dim].

        With `rotation.gated`, 2 * num_q_heads heads come before those of k.
        Rotated k, and v, are written to their slots as by `write`.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepCall:
    """The argument that `model(..., kvant=...)` passes to every attention layer of one forward."""

    step: Step
    pool: KVPool
    backends: tuple[AttentionBackend, ...]  # by layer index
    states: StatePool | None = None  # of a model that keeps more than KV

    def step_of(self, layer: int) -> Step:
        """The step through the page table that addresses what a layer reads."""
        return self.step.of(self.pool.group_of(layer))
