"""Gathers pages and decodes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvant.kv.codecs import codec_for
from kvant.kv.spec import Choice


def rows_of(
    planes: Sequence[Tensor],
    choice: Choice | None,
    scale: Tensor | None,
    pages: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Decoded rows of whole pages: [len(pages) * page_size, num_kv_heads, head_dim]."""
    assert choice is not None, "a layer with a cache stores K, and V if there is one"
    gathered = [plane.index_select(0, pages).flatten(0, 1) for plane in planes]
    return codec_for(choice.dtype).decode(gathered, scale, dtype)
