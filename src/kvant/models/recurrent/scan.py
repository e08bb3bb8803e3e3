"""Matrix-valued recurrences over packed sequences: gated delta rule, KDA, Mamba2 and linear attention.

State S [values, keys] of a head, one token with decay e^g, key k, value v, query q, strength beta:

    S <- e^g S                       g: a number per head, or one per key (KDA)
    u  = beta (v - S k)              with a delta rule, else u = v
    S <- S + u k^T,   o = S q

In chunks of C tokens, with c the sum of g inside the chunk (Yang et al., "Gated Delta Networks", 2025):

    A = strict_lower(beta_i k_i . k_j e^(c_i - c_j));   (I + A) [U M] = [beta V, beta e^c K]
    V' = U - M S^T;   O = (e^c Q) S^T + lower(q_i . k_j e^(c_i - c_j)) V'
    S <- e^(c_C) S + V'^T (e^(c_C - c) K)

Mamba2 is the case without a delta rule: q = C, k = B, v = dt x, g = dt A.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.kv.state_pool import StateCache
from kvant.models.recurrent.packed import Packed, read_state, write_state

CHUNK = 64
"""Tokens of a chunk where all keys of a head decay alike."""

KEY_CHUNK = 16
"""Tokens of a chunk where each key decays by itself: every pair of tokens has its own decays."""


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, cache: StateCache, packed: Packed
) -> Tensor:  # fmt: skip
    """Run the recurrence over each sequence's tokens, from its stored state; stores the states it ends with.

    q, k: [T, key_heads, keys], scaled as they are to be used; each of them serves heads / key_heads heads
    in order. v: [T, heads, values]. g: [T, heads] or [T, heads, keys], logarithms of decays, at most 0. beta:
    [T, heads], or None without a delta rule. Returns [T, heads, values] in float32 or wider.
    """
    work = torch.promote_types(v.dtype, torch.float32)
    q, k, v, g = (x.to(work) for x in (q, k, v, g))
    beta = None if beta is None else beta.to(work)
    if packed.lengths is None:
        state = read_state(cache, packed, None, work)
        out, state = one_token(q, k, v, g, beta, state)
        write_state(cache, packed, None, state)
        return out
    out = torch.empty_like(v)
    ones, pieces = packed.pieces()
    if ones:
        firsts = packed.cu_seqlens[:-1].to(torch.int64)
        index = firsts[torch.tensor(ones, device=v.device)]
        state = read_state(cache, packed, ones, work)
        few = None if beta is None else beta[index]
        out[index], state = one_token(q[index], k[index], v[index], g[index], few, state)
        write_state(cache, packed, ones, state)
    for place, first, count in pieces:
        there = slice(first, first + count)
        state = read_state(cache, packed, [place], work)
        some = None if beta is None else beta[there]
        out[there], last = in_chunks(q[there], k[there], v[there], g[there], some, state[0])
        write_state(cache, packed, [place], last[None])
    return out


def one_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of n sequences. state: [n, heads, values, keys], which is overwritten.

    The rest as in `scan`, with T = n. Returns the outputs and the new states.
    """
    heads = v.shape[1]
    q, k = _for_heads(q, heads, 1), _for_heads(k, heads, 1)
    decay = g.exp()
    state.mul_(decay[:, :, None, None] if g.ndim == 2 else decay[:, :, None, :])
    if beta is not None:
        v = beta[..., None] * (v - (state @ k[..., None])[..., 0])
    state += v[..., None] * k[..., None, :]
    return (state @ q[..., None])[..., 0], state


def in_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens of one sequence. state: [heads, values, keys]. Returns outputs and the last state."""
    count, heads, values = v.shape
    by_key = g.ndim == 3
    size = KEY_CHUNK if by_key else CHUNK
    num = -(-count // size)

    def chunks(x: Tensor) -> Tensor:
        """[T, heads, d] -> [heads, num, size, d]; tokens behind the last are zeros and change nothing."""
        x = x.transpose(0, 1)
        if count < num * size:
            x = torch.nn.functional.pad(x, (0, 0, 0, num * size - count))
        return x.reshape(len(x), num, size, x.shape[-1])

    q, k, v = chunks(q), chunks(k), chunks(v)
    c = chunks(g if by_key else g[..., None]).cumsum(2)
    lower = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    differences = c[:, :, :, None] - c[:, :, None]  # [heads, num, size, size, keys or 1]
    decays = differences.masked_fill(~lower[..., None], -torch.inf).exp()
    q, k = _for_heads(q, heads, 0), _for_heads(k, heads, 0)
    if by_key:
        scores = torch.einsum("hnik,hnijk,hnjk->hnij", q, decays, k)
    else:
        scores = (q @ k.transpose(-1, -2)) * decays[..., 0]
    from_state = k * c.exp()
    moved: Tensor | None = None
    if beta is not None:
        strength = chunks(beta[..., None])
        if by_key:
            products = torch.einsum("hnik,hnijk,hnjk->hnij", k, decays, k)
        else:
            products = (k @ k.transpose(-1, -2)) * decays[..., 0]
        system = (strength * products).tril(-1)
        right = torch.cat([strength * v, strength * from_state], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        v, moved = solved[..., :values], solved[..., values:]
    q = q * c.exp()
    to_end = k * (c[:, :, -1:] - c).exp()
    whole = c[:, :, -1].exp()  # [heads, num, keys or 1]
    out = torch.empty_like(v)
    for n in range(num):
        new = v[:, n]
        if moved is not None:
            new = new - moved[:, n] @ state.transpose(1, 2)
        out[:, n] = q[:, n] @ state.transpose(1, 2) + scores[:, n] @ new
        state = state * whole[:, n, None] + new.transpose(1, 2) @ to_end[:, n]
    return out.reshape(heads, num * size, values)[:, :count].transpose(0, 1), state


def _for_heads(x: Tensor, heads: int, dim: int) -> Tensor:
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)
