"""Causal depthwise convolution over packed sequences, with the last inputs of each as its state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.kv.state_pool import StateCache
from kvant.models.recurrent.packed import (
    Packed,
    in_turns,
    read_state,
    takes_kernels,
    write_state,
)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, packed: Packed, *, silu: bool
) -> Tensor:
    """Convolves each channel with its own kernel over a sequence's tokens, with zeros before the first.

    x: [T, channels]. weight: [channels, kernel]; its last column multiplies the newest token. bias:
    [channels]. silu: apply x * sigmoid(x). Returns [T, channels] in x's dtype, computed in float32 or
    wider. Replaces the states by each sequence's last kernel - 1 inputs.
    """

    def run(some: Sequence[Tensor], stored: StateCache, part: Packed) -> Tensor:
        return _convolved(some[0], weight, bias, stored, part, silu=silu)

    return in_turns(run, (x,), cache, packed)


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, packed: Packed, *, silu: bool
) -> Tensor:
    """Runs `causal_conv` for a step without drafts."""
    size = weight.shape[1]
    if takes_kernels(x, cache):
        from kvant.models.recurrent.kernels import conv_prompts, conv_step

        kept = cache.numbers, packed.rows, packed.starts
        if packed.lengths is None and not packed.singly:
            return conv_step(x, weight.contiguous(), bias, *kept, silu=silu)
        where = packed.owners, packed.cu_seqlens
        return conv_prompts(
            x, weight.contiguous(), bias, *kept, *where, silu=silu, stored=packed.singly
        )
    work = torch.promote_types(x.dtype, torch.float32)
    kernel = weight.to(work)
    history = read_state(cache, packed, None, x.dtype)  # [n, size - 1, channels]
    if packed.lengths is None:
        window = torch.cat([history, x[:, None]], 1)
        out = (window.to(work) * kernel.T).sum(1)
        newest = window[:, 1:]
    else:
        extended, behind = _extend(x, history, packed)
        columns = extended.to(work).T[None]
        every = F.conv1d(columns, kernel[:, None], groups=len(kernel))[0].T
        out = every[behind]
        ends = packed.cu_seqlens[1:].to(torch.int64)
        ends = ends + (size - 1) * torch.arange(1, len(ends) + 1, device=x.device)
        newest = extended[ends[:, None] + torch.arange(1 - size, 0, device=x.device)]
    write_state(cache, packed, None, newest)
    if bias is not None:
        out = out + bias.to(work)
    return (F.silu(out) if silu else out).to(x.dtype)


def _extend(x: Tensor, history: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Inserts each sequence's history before its tokens. Returns that, and the index of each result, [T]."""
    assert packed.lengths is not None
    num, before = history.shape[:2]
    owner = packed.owners.to(torch.int64)
    behind = torch.arange(len(x), device=x.device) + owner * before
    extended = x.new_empty(len(x) + num * before, x.shape[1])
    extended[behind + before] = x
    starts = packed.cu_seqlens[:-1].to(torch.int64) + before * torch.arange(num, device=x.device)
    extended[starts[:, None] + torch.arange(before, device=x.device)] = history
    return extended, behind
