"""Arguments that launches share: planes as kernels load them, scales, paddings."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kvant.attention.base import Step
from kvant.attention.triton.cut import Cut
from kvant.attention.triton.format import Format
from kvant.attention.triton.rotation import rotate_rows
from kvant.attention.triton.words import load_24_bit_words
from kvant.attention.triton.workmap import list_items
from kvant.kernels.triton.device import launches_ahead, multiprocessors
from kvant.kv.pool import LayerCache

_MOST_EARLY = 8
"""Maximum number of rows per multiprocessor whose rotation is launched ahead. Where programs fill the device,
the next attention's start in places that happen to be free, while some of the launch before still run. 64
sequences of 8,192 tokens in int4 took 205 us instead of 177 on an H200, in launches of attention in turn."""


def lanes(num_seqs: int) -> int:
    """Sequences that a program scans at a time (`workmap`): one alone needs no sums over threads."""
    return 1 if num_seqs == 1 else 128


def ahead(device: torch.device) -> dict[str, Any]:
    """Returns options of a launch that may start while the previous kernel runs, if the device can do so."""
    found = launches_ahead(device)
    return {"AHEAD": found, **({"launch_pdl": True} if found else {})}


def rotate(x: Tensor, block: int) -> Tensor:
    """Rotates rows of x [.., n] (contiguous or not) and divides them by `block`: float32 [.., n]."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    n = x.shape[-1]
    rows = x.numel() // n
    early = rows <= _MOST_EARLY * multiprocessors(x.device)
    rotate_rows[(triton.cdiv(rows, 4),)](
        x, out, rows, 1.0 / block,
        HEAD=n, PAD=triton.next_power_of_2(n), SIZE=block, ROWS=4, num_warps=1,
        **(ahead(x.device) if early else {"AHEAD": False}),
    )  # fmt: skip
    return out


def words(planes: tuple[Tensor, ...], format: Format) -> tuple[Tensor, Tensor | None]:
    """Views planes [num_pages, page_size, num_kv_heads, width] for kernels: words, scales or None."""
    codes = planes[0].view(format.word)
    if format.scale_word is None:
        return codes, None
    return codes, planes[1].view(format.scale_word)


def shifts(device: torch.device, *formats: Format) -> Tensor | None:
    """Returns int32 [4] for `words.load_24_bit_words`; None if no format has such words."""
    return _shifts(device) if any(f.load is load_24_bit_words for f in formats) else None


@cache
def _shifts(device: torch.device) -> Tensor:
    return torch.tensor([0, 24, 16, 8], dtype=torch.int32, device=device)


def stores(planes: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """Views planes [num_pages, page_size, num_kv_heads, width] for the writer: codes, scale bits or None."""
    if len(planes) == 1:
        return planes[0], None
    bits = {torch.float32: torch.int32, torch.float16: torch.int16}
    scales = planes[1]
    return planes[0], scales.view(bits.get(scales.dtype, scales.dtype))


def page_units(cache: LayerCache) -> int:
    """Returns the distance of two pages in units of 16 bytes, the same in each of the layer's planes."""
    return cache.page_stride // 16


def pad(head_dim: int, format: Format) -> int:
    """Returns the words of a row, padded to a power of two that a matrix product takes."""
    return max(16, int(triton.next_power_of_2(head_dim // format.elements)))


def listed_items(step: Step, cut: Cut, window: int, *, tokens: bool) -> Tensor:
    """Returns the step's items, or its tokens, from `list_items`; computed once for all layers cut alike."""
    shape, count = cut.shape, cut.tokens if tokens else cut.items
    key = (
        count,
        shape.rows,
        shape.tile,
        cut.group,
        cut.target,
        cut.least,
        cut.fixed,
        window,
        tokens,
    )
    found = step.lists.get(key)
    if found is None:
        found = step.seqlens_kv.new_empty(count, 4)
        list_items[(count,)](
            found, step.cu_seqlens_q, step.seqlens_kv, cut.num_seqs, window, cut.target, cut.least,
            GROUP=cut.group, ROWS=shape.rows, TILE=shape.tile, CAUSAL=step.causal,
            WINDOW=window > 0, FIXED=cut.fixed, TOKENS=tokens, num_warps=1,
        )  # fmt: skip
        step.lists[key] = found
    return found
