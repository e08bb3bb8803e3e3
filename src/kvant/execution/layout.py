"""Where the tokens of a recorded step stand, and what follows it: computed on the device, from a few
numbers of each sequence, so that one step can begin where the one before ended without asking the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.attention.base import Step


@dataclass(frozen=True, slots=True)
class Layout:
    """A step of n sequences with one token and up to k drafts each, T = n * (1 + k) rows.

    owners: [T] int64, the row's sequence. places: [T] int64, 0 for its newest token, then its drafts;
    rows that are not used belong to the last sequence, beyond its counts. is_first: [T] bool, the
    newest tokens. counts: [n] int64, tokens of each sequence, 1 at least.
    """

    step: Step
    owners: Tensor
    places: Tensor
    is_first: Tensor
    counts: Tensor


def lay_out(
    starts: Tensor,
    ends: Tensor,
    table: Tensor,
    num_drafts: int,
    page_size: int,
    max_model_len: int,
) -> Layout:
    """starts, ends: [n] int64 as in `Decodes`; a sequence that ends where it starts writes nothing
    and sees nothing, its one row is padding. table: [n, pages] int32.
    """
    count = starts.shape[0]
    rows = torch.arange(count * (1 + num_drafts), device=starts.device)
    is_there = starts < ends
    if num_drafts:
        counts = 1 + (ends - starts - 1).clamp(0, num_drafts)
        cu_seqlens = torch.zeros(count + 1, dtype=torch.int64, device=starts.device)
        cu_seqlens[1:] = counts.cumsum(0)
        is_token = rows < cu_seqlens[-1]
        owners = torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp_(max=count - 1)
        places = rows - cu_seqlens[owners]
        positions = torch.where(is_token, starts[owners] + places, 0)
        is_written = is_token & is_there[owners]
    else:
        counts = torch.ones_like(starts)
        cu_seqlens = torch.arange(count + 1, device=starts.device)
        owners, places, positions = rows, torch.zeros_like(rows), starts
        is_written = is_there
    pages = table[owners, (positions // page_size).clamp_(max=table.shape[1] - 1)]
    slots = pages.to(torch.int64) * page_size + positions % page_size
    step = Step(
        cu_seqlens_q=cu_seqlens.to(torch.int32),
        seqlens_kv=torch.where(is_there, starts + counts, 0).to(torch.int32),
        page_table=table,
        slot_mapping=torch.where(is_written, slots, -1),
        positions=positions,
        max_seqlen_q=1 + num_drafts,
        max_seqlen_kv=max_model_len,
    )
    return Layout(step, owners, places, places == 0, counts)


def what_follows(
    layout: Layout, starts: Tensor, tokens: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor]:
    """Each sequence's newest token after the step and where it stands, [n] int64 each.

    tokens: [T], what was run. chosen: [T], what the target says follows each of them: a draft stands
    if all before it do and it is what was chosen there.
    """
    rows = tokens.shape[0]
    count = starts.shape[0]
    if rows == count:
        return chosen, starts + 1
    differs = torch.zeros_like(layout.is_first)
    differs[1:] = tokens[1:] != chosen[:-1]
    # The first draft that does not stand, by its place: as many tokens are new. Rows that are not used
    # lie beyond the counts.
    places = torch.where(differs & ~layout.is_first, layout.places, rows)
    new = layout.counts.scatter_reduce(0, layout.owners, places, "amin")
    last = layout.step.cu_seqlens_q[:-1] + new - 1
    return chosen[last], starts + new
