"""The metadata of one forward step, and the protocol of a backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvant.kv.pool import KVPool, LayerCache
from kvant.kv.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class LongQuery:
    """A sequence of a step with many query tokens; all fields are host integers.

    sequence: its index in the step. first_token: index in T of its first query. num_tokens: its queries in
    this step. length: tokens in the cache once this step's are written.
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

    Kernels may read its tensors, and stored rows that it does not write, while the kernel before them still
    runs. So at least one ordinary launch, which starts after all launches before it have ended, lies between
    what writes them and the first layer.

    The sequences of a step are concatenated in the token dimension T.
    cu_seqlens_q: [num_seqs + 1] int32, offsets of each sequence's query tokens in T.
    seqlens_kv: [num_seqs] int32, tokens in the cache once this step's are written.
    page_table: [num_seqs, max_pages] int32, page ids; entries past the sequence's end are unread.
    slot_mapping: [T] int64, page * page_size + offset to write each token to; -1 writes nowhere.
    positions: [T] int64, rotary positions.
    max_seqlen_q, max_seqlen_kv: host copies of the largest lengths.
    causal: query i of a sequence with n queries sees keys up to seqlen_kv - n + i; otherwise all.
    long: the last sequences, if they have LONG queries or more, for backends that treat them
    differently; `rest` holds the sequences before them (None if there are none).
    wanted: for a last layer whose other rows are not used: the step with only the queries whose logits are
    wanted, and their sequences. None if they are not listed, or if all are wanted.
    rows: [num_seqs] int64, each sequence's row of the row table, the last row for padding. Only layers with
    recurrent states read it (`StatePool`).
    lengths: query tokens of each sequence on the host; None if each has one, or if no layer needs them.
    draft_states: index of the state after each sequence's first draft; later drafts follow it. -1 for a
    sequence without drafts. None for a step without drafts, or for a model without states.
    others: this step with the page tables of the second and later groups of pages; see `of`. page_table,
    slot_mapping and tensors that depend on them belong to the first group.
    lists, slices, kept: caches. What the first layer derives from this step, later layers find here: tensors
    computed from the lengths, steps for parts of the queries by their first token and end, and other objects.
    If the lengths change in place, as between replays of a CUDA graph, a new Step is made for the recording.
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
        """Returns the step with the page table of a group of pages (`kvant.kv.groups`)."""
        return self.others[group - 1] if group else self


def with_groups(step: Step, others: Sequence[tuple[Tensor, Tensor]]) -> Step:
    """Returns the step with the page tables and slots of the second and later groups.

    others: for each such group, page_table [num_seqs, max_pages] int32 and slot_mapping [T] int64.
    """
    if not others:
        return step
    found = tuple(
        replace(step, page_table=table, slot_mapping=slots, others=()) for table, slots in others
    )
    return replace(step, others=found)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of a layer's attention, apart from its cache.

    scale: factor on q.k. window: tokens a query sees, itself included, None for all (a bidirectional
    query sees window - 1 tokens to either side). softcap: 0 for none. sinks: [num_q_heads] logits or
    None.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """Writes rows into pages and attends over decoded pages. q, k, v and results have the compute dtype."""

    name: str

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Encodes k [T, num_kv_heads, head_dim_k] and v [T, num_kv_heads, head_dim_v] into their slots.

        v: None for latents, of which only rows of K are stored. Tokens with slot -1 are not written.
        """
        ...

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Attends with q [T, num_q_heads, head_dim_k] over stored bytes.

        Returns [T, num_q_heads, head_dim_v].
        """
        ...


Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Makes keys [m, heads, head_dim] and values [m, heads, head_dim_v] from stored latents [m, width].

All have the compute dtype.
"""


@runtime_checkable
class ExpandingBackend(Protocol):
    """A backend that can expand latents to keys and values, for the queries of `Step.long`."""

    def expands(self, q: Tensor) -> bool:
        """Whether it expands latents for queries q [T, num_q_heads, head_dim].

        Only dtype and shape matter.
        """
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
        """Attends with q [T, num_q_heads, head_dim] to expanded rows; writes rows of `step.long` in out.

        out: [T, num_q_heads, head_dim_v], in the dtype of q.
        """
        ...


class HeadNorm(Enum):
    """Where an RMS norm of a head rounds, and what it multiplies by."""

    ROUNDED = "w * cast(x^)"
    WIDE = "cast(w * x^)"
    ONE = "cast((1 + w) * x^)"


@dataclass(frozen=True, slots=True)
class HeadRotation:
    """Norm and rotation of the heads of q and k before attention.

    cos, sin: [.., R / 2], indexed by position if by_position, else by token of the step. R may be 0. Pairs
    (a, b) of a head's first R numbers become (a cos - b sin, b cos + a sin). q_weight, k_weight: [head_dim],
    weights of an RMS norm of every head before the rotation, or None. neighbours: pairs are 2 i and 2 i + 1,
    else i and i + R / 2. gated: each head of q is followed by its gate, which is skipped.
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
    """A backend that can also normalise and rotate heads before it writes."""

    def write_rotated(
        self, cache: LayerCache, qkv: Tensor, rotation: HeadRotation, step: Step
    ) -> Tensor:
        """Returns rotated q [T, num_q_heads, head_dim] of qkv [T, (num_q_heads + 2 num_kv_heads) * head_dim].

        With `rotation.gated`, 2 * num_q_heads heads precede the heads of k. Rotated k, and v, are written to
        their slots as by `write`. q has the dtype of qkv.
        """
        ...

    def attend_rotated(
        self,
        cache: LayerCache,
        qkv: Tensor,
        rotation: HeadRotation,
        step: Step,
        params: AttentionParams,
    ) -> Tensor | None:
        """Does `write_rotated` and then `attend` in one launch; returns [T, num_q_heads, head_dim].

        Returns None, and has done nothing, if it has no such launch for the step.
        """
        ...


class ShortSteps(NamedTuple):
    """Decode steps of at most `seqs` sequences, each of at most `tokens` tokens in the cache."""

    tokens: int
    seqs: int


@runtime_checkable
class ShortReader(Protocol):
    """A backend with a faster kernel for short decode steps, chosen by `Step.max_seqlen_kv`."""

    def short_steps(self, cache: LayerCache, dtype: torch.dtype) -> ShortSteps | None:
        """Returns the steps that it serves for a layer and queries of `dtype`, or None."""
        ...


@dataclass(frozen=True, slots=True)
class StepCall:
    """The argument that `model(..., kvant=...)` passes to every attention layer of one forward."""

    step: Step
    pool: KVPool
    backends: tuple[AttentionBackend, ...]  # by layer index
    states: StatePool | None = None  # of a model that keeps more than KV

    def step_of(self, layer: int) -> Step:
        """Returns the step with the page table of the pages that a layer reads."""
        return self.step.of(self.pool.group_of(layer))
