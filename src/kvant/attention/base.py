"""What one forward step carries, and the protocol of a backend."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvant.kv.pool import KVPool, LayerCache


@dataclass(frozen=True, slots=True)
class LongQuery:
    """A sequence of a step with many query tokens, in numbers of the host.

    sequence: its place in the step. first_token: its first query's place in T. length: tokens in
    the cache after this step's are written, the num_tokens of this step among them.
    """

    sequence: int
    first_token: int
    num_tokens: int
    length: int

    @property
    def is_new(self) -> bool:
        """Whether nothing of it was stored before this step."""
        return self.num_tokens == self.length


@dataclass(frozen=True, slots=True)
class Step:
    """One forward over packed sequences; travels as an argument, never as a global.

    Sequences of one step lie behind each other in the token dimension T.
    cu_seqlens_q: [num_seqs + 1] int32, offsets of each sequence's query tokens in T.
    seqlens_kv: [num_seqs] int32, tokens in the cache after this step's are written.
    page_table: [num_seqs, max_pages] int32, page ids; entries past the sequence's end are unread.
    slot_mapping: [T] int64, page * page_size + offset to write each token to; -1 writes nowhere.
    positions: [T] int64, rotary positions.
    max_seqlen_q, max_seqlen_kv: host copies of the largest lengths.
    causal: query i of a sequence with n queries sees keys up to seqlen_kv - n + i; otherwise all.
    long: the last sequences, if they have LONG queries or more, for backends that treat them in
    another way; they find those before them in `rest` (None if there are none).
    wanted: the step of the queries whose logits are wanted alone, with their sequences, for a last
    layer whose other rows nobody looks at; None where nobody listed them, or where all are wanted.
    lists: what a backend has worked out of the lengths in one layer, for the layers after it: a step whose
    lengths are to change in place, as between replays of a graph, is made anew where it is recorded.
    slices: likewise, the steps of some of its queries, by the first and the end of their tokens.
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
    lists: dict[Hashable, Tensor] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    slices: dict[tuple[int, int], Step] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer's attention does beside the cache.

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

    def write(self, cache: LayerCache, k: Tensor, v: Tensor, step: Step) -> None:
        """Encode k [T, num_kv_heads, head_dim_k] and v [T, num_kv_heads, head_dim_v] into their slots."""
        ...

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """q [T, num_q_heads, head_dim_k] -> [T, num_q_heads, head_dim_v], over stored bytes only."""
        ...


@dataclass(frozen=True, slots=True)
class HeadRotation:
    """What becomes of heads of q and k before they meet.

    cos, sin: [.., head_dim / 2] for halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), by position
    or, without by_position, by token of the step. q_weight, k_weight: [head_dim], of an RMS norm of every
    head before, or None.
    """

    cos: Tensor
    sin: Tensor
    by_position: bool
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float


@runtime_checkable
class RotatingWriter(Protocol):
    """A backend that also does what comes before writing."""

    def write_rotated(
        self, cache: LayerCache, qkv: Tensor, rotation: HeadRotation, step: Step
    ) -> Tensor:
        """q [T, num_q_heads, head_dim] of qkv [T, (num_q_heads + 2 num_kv_heads) * head_dim], rotated;
        k, rotated, and v go into their slots as `write` does it.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepCall:
    """What `model(..., kvant=...)` hands to every attention layer of one forward."""

    step: Step
    pool: KVPool
    backends: tuple[AttentionBackend, ...]  # by layer index
