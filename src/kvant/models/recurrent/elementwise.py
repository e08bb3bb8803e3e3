"""Computes elementwise recurrences h_t = a_t h_(t-1) + b_t over packed sequences, as in Mamba1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvant.kv.state_pool import StateCache, draft_page
from kvant.models.recurrent.packed import Packed, read_state, write_state

_AT_ONCE = 64
"""Most tokens of a prompt that are computed at once, since each of them needs memory for a state."""

Make = Callable[[slice], tuple[Tensor, Tensor]]
"""Returns a and b [n, *shape] of some tokens, in float32 or wider."""

Use = Callable[[slice, Tensor], None]
"""Called with the states [n, *shape] after some tokens."""


def elementwise_scan(make: Make, use: Use, cache: StateCache, packed: Packed) -> None:
    """Runs the recurrence over each sequence's tokens, from its stored state. Stores the final states.

    make, use: called for slices of the step's tokens in order, since states of all would need much memory.
    """
    if packed.lengths is None:
        every = slice(0, len(packed.rows))
        a, b = make(every)
        found = a * read_state(cache, packed, None, a.dtype) + b
        write_state(cache, packed, None, found)
        use(every, found)
        return
    first, drafts = 0, packed.step.draft_states
    at_once = 1 if packed.singly else _AT_ONCE
    for place, length in enumerate(packed.lengths):
        if not length:
            continue
        state: Tensor | None = None
        has_drafts, behind = drafts is not None and drafts[place] >= 0, []
        for start in range(first, first + length, at_once):
            there = slice(start, min(start + at_once, first + length))
            a, b = make(there)
            if state is None:
                state = read_state(cache, packed, [place], a.dtype)[0]
            found = _double(a, b, state)
            use(there, found)
            state = found[-1]
            if has_drafts:
                behind.append(found)
        assert state is not None
        if drafts is not None and has_drafts:
            assert cache.drafts is not None
            kept = torch.cat(behind)
            write_state(cache, packed, [place], kept[:1])
            rows = torch.arange(length - 1, device=kept.device) + draft_page(drafts[place])
            write_state(cache.drafts, replace(packed, rows=rows), None, kept[1:])
        else:
            write_state(cache, packed, [place], state[None])
        first += length


def _double(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """Returns the states of n consecutive tokens, in log2(n) passes that double the tokens in each state."""
    b = torch.cat([(a[:1] * state + b[:1]), b[1:]])
    step = 1
    while step < len(b):
        b = torch.cat([b[:step], b[step:] + a[step:] * b[:-step]])
        a = torch.cat([a[:step], a[step:] * a[:-step]])
        step *= 2
    return b
