"""The torch definition of every format: `encode` and `decode` here define its name.

Kernels elsewhere must produce the same bytes and read the same values. All arithmetic is float32
(float64 input is rounded to float32 first), one IEEE operation at a time, so that the bytes are the
same on every device; rounding is to nearest even, casts saturate. Layouts: docs/formats.md.

In every format but the native ones, numbers of magnitude above `CLAMP` are clamped before anything
else, so that finite input never becomes infinite or NaN. NaN stays NaN in every format: its code is
the encoding's one canonical NaN, or the scale that it shares is.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from kvant.kv.dtype import KVDtype
from kvant.kv.format import Element, KVFormat

CLAMP = 2.0**100
"""Bound on |x| before encoding, and on scales from outside: each must lie in [1 / CLAMP, CLAMP]."""

TORCH_ELEMENT = {
    Element.UINT8: torch.uint8,
    Element.INT16: torch.int16,
    Element.FLOAT16: torch.float16,
    Element.BFLOAT16: torch.bfloat16,
    Element.FLOAT32: torch.float32,
}


class Codec(Protocol):
    """Rows to planes and back, for one format.

    Shapes: x is [..., num_kv_heads, head_dim], any floating dtype, any leading shape (also with no
    rows). `scale` is the scale from outside the pages (ScalePlace.PARAMETER, and nvfp4's global
    scale): float32, [1] or [num_kv_heads], finite and in [1 / CLAMP, CLAMP] (readers of scales
    refuse others), or None for formats that have none. Planes come in the order of
    `KVFormat.planes`, each [..., num_kv_heads, plane.width] in its element's dtype.

    The bytes of a row depend on that row (and on `scale`) alone. Zeroed planes decode to zeros.
    """

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Encodes x [..., num_kv_heads, head_dim] into planes. Does not mutate x.

        A plane may be x itself if nothing changes.
        """
        ...

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decoded rows [..., num_kv_heads, head_dim] in `dtype`, computed in float32.

        Values beyond the range of a narrower `dtype` saturate. The result may be a plane itself
        (native formats in their own dtype): do not write to it.
        """
        ...


class _CodecModule(Protocol):
    def codec(self, fmt: KVFormat) -> Codec: ...


@cache
def codec_for(dtype: KVDtype) -> Codec:
    """Returns the codec that defines `dtype`; its module is imported on first use."""
    module = cast(_CodecModule, importlib.import_module(f"kvant.kv.codecs.{dtype.format.codec}"))
    return module.codec(dtype.format)
