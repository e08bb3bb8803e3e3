"""Elementwise recurrences h_t = a_t h_(t-1) + b_t over packed sequences: Mamba1 and RG-LRU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.kv.state_pool import StateCache
from kvant.models.recurrent.packed import Packed, read_state, write_state

_AT_ONCE = 64
"""Tokens of a prompt whose states are made at once: memory grows with them."""


def elementwise_scan(a: Tensor, b: Tensor, cache: StateCache, packed: Packed) -> Tensor:
    """The states after every token. a, b: [T, *shape] in float32 or wider. Stores the last state of each."""
    if packed.lengths is None:
        state = a * read_state(cache, packed, None, a.dtype) + b
        write_state(cache, packed, None, state)
        return state
    out = torch.empty_like(b)
    first = 0
    before = read_state(cache, packed, None, a.dtype)
    last = before.clone()
    for place, length in enumerate(packed.lengths):
        state = before[place]
        for start in range(first, first + length, _AT_ONCE):
            there = slice(start, min(start + _AT_ONCE, first + length))
            found = _double(a[there], b[there], state)
            out[there], state = found, found[-1]
        last[place] = state
        first += length
    write_state(cache, packed, None, last)
    return out


def _double(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """The states of consecutive tokens: in log2(n) passes, each token takes in twice as many before it."""
    b = torch.cat([(a[:1] * state + b[:1]), b[1:]])
    step = 1
    while step < len(b):
        b = torch.cat([b[:step], b[step:] + a[step:] * b[:-step]])
        a = torch.cat([a[:step], a[step:] * a[:-step]])
        step *= 2
    return b
