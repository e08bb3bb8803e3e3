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

from collections.abc import Sequence

import torch
from torch import Tensor

from kvant.kv.state_pool import StateCache
from kvant.models.recurrent.packed import (
    Chunks,
    Packed,
    in_turns,
    read_state,
    takes_kernels,
    write_state,
)

CHUNK = 64
"""Tokens of a chunk if all keys of a head have the same decay."""

KEY_CHUNK = 16
"""Tokens of a chunk if each key has its own decay, since every pair of tokens then needs decays per key."""


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, cache: StateCache, packed: Packed,
    *, singles: bool = True,
) -> Tensor:  # fmt: skip
    """Runs the recurrence over each sequence's tokens, from its stored state. Stores the final states.

    q, k: [T, key_heads, keys], already scaled; each key head serves heads / key_heads consecutive heads.
    v: [T, heads, values]. g: [T, heads] or [T, heads, keys], logarithms of decays, at most 0. beta:
    [T, heads], or None without a delta rule. singles: False leaves sequences with one token alone; their
    results are undefined. Returns [T, heads, values] in float32 or wider.
    """

    def run(some: Sequence[Tensor], stored: StateCache, part: Packed) -> Tensor:
        beta = some[4] if len(some) > 4 else None
        return _scanned(*some[:4], beta=beta, cache=stored, packed=part, singles=singles)

    return in_turns(run, [x for x in (q, k, v, g, beta) if x is not None], cache, packed)


def _scanned(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, beta: Tensor | None, cache: StateCache,
    packed: Packed, singles: bool,
) -> Tensor:  # fmt: skip
    """Runs `scan` for a step without drafts."""
    work = torch.promote_types(v.dtype, torch.float32)
    q, k, v, g = (x.to(work) for x in (q, k, v, g))
    beta = None if beta is None else beta.to(work)
    if packed.lengths is None:
        state = read_state(cache, packed, None, work)
        out, state = one_token(q, k, v, g, beta, state, apart=packed.singly)
        write_state(cache, packed, None, state)
        return out
    out = torch.empty_like(v)
    rows, index = packed.singles
    if len(rows) and singles:
        state = read_state(cache, packed, rows, work)
        few = None if beta is None else beta[index]
        out[index], state = one_token(q[index], k[index], v[index], g[index], few, state)
        write_state(cache, packed, rows, state)
    chunks = packed.chunks(KEY_CHUNK if g.ndim == 3 else CHUNK)
    if chunks is not None:
        _in_chunks(q, k, v, g, beta, chunks, cache, packed, out)
    return out


def one_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor,
    *, apart: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs one token of each of n sequences. state: [n, heads, values, keys], which is overwritten.

    Other arguments: as in `scan`, with T = n. apart: no sequence's sums may depend on the others. Returns
    the outputs [n, heads, values] and the new states.
    """
    heads = v.shape[1]
    q, k = _for_heads(q, heads), _for_heads(k, heads)
    decay = g.exp()
    state.mul_(decay[:, :, None, None] if g.ndim == 2 else decay[:, :, None, :])
    if beta is not None:
        v = beta[..., None] * (v - _product(state, k, apart=apart))
    state += v[..., None] * k[..., None, :]
    return _product(state, q, apart=apart), state


def _product(state: Tensor, x: Tensor, *, apart: bool) -> Tensor:
    """Multiplies state [n, heads, values, keys] by x [n, heads, keys]; returns [n, heads, values]."""
    return (state * x[:, :, None]).sum(-1) if apart else (state @ x[..., None])[..., 0]


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chunks: Chunks, cache: StateCache,
    packed: Packed, out: Tensor,
) -> None:  # fmt: skip
    """Writes results of the tokens in chunks to out [T, heads, values]; stores the states."""
    heads, values = v.shape[1:]
    by_key = g.ndim == 3

    def cut(x: Tensor) -> Tensor:
        """Cuts x [T, heads, d] into [m, heads, size, d]. Padding tokens are zeros, which have no effect."""
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])[chunks.tokens]
        return x.view(-1, chunks.size, *x.shape[1:]).transpose(1, 2)

    q, k, v = (_for_heads(cut(x), heads) for x in (q, k, v))
    c = cut(g if by_key else g[..., None]).cumsum(2)
    lower = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=v.device).tril()
    differences = c[:, :, :, None] - c[:, :, None]  # [m, heads, size, size, keys or 1]
    decays = differences.masked_fill_(~lower[..., None], -torch.inf).exp_()

    def products(left: Tensor) -> Tensor:
        if by_key:
            return torch.einsum("mhik,mhijk,mhjk->mhij", left, decays, k)
        return (left @ k.transpose(-1, -2)) * decays[..., 0]

    scores, since = products(q), c.exp()
    moved: Tensor | None = None
    if beta is not None:
        strength = cut(beta[..., None])
        system = (strength * products(k)).tril(-1)
        right = torch.cat([strength * v, strength * (k * since)], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        v, moved = solved[..., :values], solved[..., values:]
    q, k = q * since, k * (c[:, :, -1:] - c).exp()
    whole = since[:, :, -1]  # [m, heads, keys or 1]
    if takes_kernels(v, cache) and not by_key:
        from kvant.models.recurrent.kernels import over_chunks
        from kvant.models.recurrent.stored import Stored

        moved = None if moved is None else moved.contiguous()
        over_chunks(
            q.contiguous(), k.contiguous(), v.contiguous(), moved, scores.contiguous(),
            whole[..., 0].contiguous(), Stored.of(cache), packed.rows, packed.starts, chunks, out,
        )  # fmt: skip
        return
    state = read_state(cache, packed, chunks.places, v.dtype)
    found = torch.empty_like(v)
    for n in range(chunks.counts[0]):
        there = [
            begin + n
            for begin, count in zip(chunks.begins, chunks.counts, strict=True)
            if count > n
        ]
        before = state[: len(there)]
        new = v[there]
        if moved is not None:
            new = new - moved[there] @ before.transpose(-1, -2)
        found[there] = q[there] @ before.transpose(-1, -2) + scores[there] @ new
        state[: len(there)] = before * whole[there][:, :, None] + new.transpose(-1, -2) @ k[there]
    write_state(cache, packed, chunks.places, state)
    out[chunks.where] = found.transpose(1, 2).reshape(-1, heads, values)[chunks.found]


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Repeats the heads in dimension 1 to get `heads` of them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
