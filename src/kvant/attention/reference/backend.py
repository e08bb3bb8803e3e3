"""Writes rows into pages and attends over decoded pages, in plain torch.

    pages of a group of sequences --gather--> planes --decode--> rows --slice--> one sequence's rows

Rows past a sequence's end, and rows behind the first query's window, are cut off before any
arithmetic, so no bytes there (NaN too) can reach a result. Each sequence is computed
alone, so the rest of the step does not change its bits. In batch-invariant mode, the number of its
tokens in the step does not either, see `tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.attention.base import AttentionBackend, AttentionParams, Step
from kvant.attention.reference.both import attend_both, rows_of
from kvant.attention.reference.scores import attend_rows
from kvant.attention.reference.tiles import ROW_TILE, attend_tiles
from kvant.kv.codecs import codec_for
from kvant.kv.pool import LayerCache
from kvant.kv.spec import Choice

GROUP_PAGES = 1024
"""Maximum pages decoded at once, which bounds the memory of decoded rows."""


@dataclass(frozen=True, slots=True)
class _Span:
    """The cache rows that one sequence's queries can see. In batch-invariant mode, they start at a tile.

    q_start, q_end: its queries in T. seqlen_kv: its length. first: the first visible token.
    first_page, end_page: columns of the page table.
    """

    sequence: int
    q_start: int
    q_end: int
    seqlen_kv: int
    first: int
    first_page: int
    end_page: int


class ReferenceBackend:
    """`AttentionBackend` for any device.

    compute: minimum dtype of all arithmetic; float64 makes an oracle. Wider queries raise it;
    narrower ones are widened and the result is rounded back. batch_invariant: a query's bits do not
    depend on the rest of the step.
    """

    name = "reference"

    def __init__(
        self, compute: torch.dtype = torch.float32, *, batch_invariant: bool = False
    ) -> None:
        self.compute = compute
        self.batch_invariant = batch_invariant

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Encodes k, v [T, num_kv_heads, head_dim] and stores them in `step.slot_mapping`'s slots.

        v: None if only K is stored.
        """
        if cache.wide is not None:
            self.write(cache.wide, k, v, step.of(cache.wide_group))
        slots = step.slot_mapping
        if cache.saturation is not None:
            cache.saturation.sample((k, v), (cache.k_scale, cache.v_scale), slots)
        keep = slots >= 0
        if not bool(keep.all()):
            slots, k, v = slots[keep], k[keep], None if v is None else v[keep]
        _store(cache.k, cache.spec.k, k, cache.k_outside, slots)
        if v is not None:
            _store(cache.v, cache.spec.v, v, cache.v_scale, slots)

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Attends with q [T, num_q_heads, head_dim_k]; returns [T, num_q_heads, head_dim_v] in q's dtype.

        Tokens of no sequence, or of a sequence without stored tokens, get zeros.
        """
        if cache.wide is not None:
            return attend_both(
                cache, q, step, params,
                torch.promote_types(self.compute, q.dtype), tiled=self.batch_invariant,
            )  # fmt: skip
        compute = torch.promote_types(self.compute, q.dtype)
        out = q.new_zeros(q.shape[0], q.shape[1], cache.spec.geometry.head_dim_v)
        tile = ROW_TILE if self.batch_invariant else 1
        for group in _groups(_spans(step, params.window, cache.page_size, tile)):
            tables = [step.page_table[s.sequence, s.first_page : s.end_page] for s in group]
            pages = torch.cat(tables)
            k = rows_of(cache.k, cache.spec.k, cache.k_scale, pages, compute)
            if cache.spec.v is None:  # the latent is also the value
                v = k[..., : cache.spec.geometry.head_dim_v]
            else:
                v = rows_of(cache.v, cache.spec.v, cache.v_scale, pages, compute)
            base = 0  # row of the group's first page of this sequence
            for s in group:
                start = base + s.first - s.first_page * cache.page_size
                end = start + s.seqlen_kv - s.first
                base += (s.end_page - s.first_page) * cache.page_size
                queries = q[s.q_start : s.q_end].to(compute)
                position = s.seqlen_kv - len(queries)
                if self.batch_invariant:
                    out[s.q_start : s.q_end] = attend_tiles(
                        queries,
                        k[start:end],
                        v[start:end],
                        first=s.first,
                        position=position,
                        causal=step.causal,
                        params=params,
                    )
                else:
                    out[s.q_start : s.q_end] = attend_rows(
                        queries,
                        k[start:end],
                        v[start:end],
                        offset=position - s.first,
                        causal=step.causal,
                        params=params,
                    )
        return out


def backend(*, batch_invariant: bool = False) -> AttentionBackend:
    """Builds the backend for the engine, which computes in float32 or wider."""
    return ReferenceBackend(batch_invariant=batch_invariant)


def _store(
    planes: Sequence[Tensor],
    choice: Choice | None,
    rows: Tensor,
    scale: Tensor | None,
    slots: Tensor,
) -> None:
    assert choice is not None, "a layer with a cache stores K, and V if there is one"
    pages, offsets = slots // planes[0].shape[1], slots % planes[0].shape[1]
    for plane, encoded in zip(planes, codec_for(choice.dtype).encode(rows, scale), strict=True):
        plane.index_put_((pages, offsets), encoded)


def _spans(step: Step, window: int | None, page_size: int, tile: int) -> Iterator[_Span]:
    """Yields the rows that each sequence with queries and stored tokens reads, from a multiple of `tile`."""
    offsets = step.cu_seqlens_q.tolist()
    for sequence, seqlen_kv in enumerate(step.seqlens_kv.tolist()):
        q_start, q_end = offsets[sequence], offsets[sequence + 1]
        if q_start == q_end or seqlen_kv == 0:
            continue
        first_query = seqlen_kv - (q_end - q_start)
        assert first_query >= 0 or not step.causal, "a step's own tokens are among the stored ones"
        first = 0 if window is None else max(0, first_query - window + 1)
        first -= first % tile
        end_page = -(-seqlen_kv // page_size)
        yield _Span(sequence, q_start, q_end, seqlen_kv, first, first // page_size, end_page)


def _groups(spans: Iterator[_Span]) -> Iterator[list[_Span]]:
    """Groups neighbouring sequences to decode together: at most GROUP_PAGES, or one sequence."""
    group: list[_Span] = []
    pages = 0
    for span in spans:
        size = span.end_page - span.first_page
        if group and pages + size > GROUP_PAGES:
            yield group
            group, pages = [], 0
        group.append(span)
        pages += size
    if group:
        yield group
