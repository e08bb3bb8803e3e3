"""int4_feedback: int4_per_token_head whose codes are rounded with error feedback. Keys only.

Rotation, scale, zero point and decoding are int4_per_token_head's. M is the layer's matrix of the row's KV
head [D, D], float32, strictly upper triangular (`kvant.measure.calibration.feedback` says how it is made):

    w = y
    for i = 0 .. D - 1:
        code_i = clamp(nearest(w_i / scale) + zp, 0, 15)
        e      = y_i - (code_i - zp) * scale
        w_j    = w_j + e * M_ij                for every j > i

Products and sums are rounded apart: no fused multiply-add. So element j takes over errors of the elements
before it, in their order. Where M is zero, the bytes are int4_per_token_head's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec, packed
from kvant.kv.codecs.conversion import widen
from kvant.kv.codecs.int4_per_token_head import STEPS, RotatedInt4Codec
from kvant.kv.codecs.rotation import rotate
from kvant.kv.format import KVFormat


@dataclass(frozen=True, slots=True)
class FeedbackInt4Codec:
    """`scale`: the matrices [num_kv_heads, head_dim, head_dim]; None for matrices of zeros."""

    plain: RotatedInt4Codec

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        codes, stored = self.plain.encode(x, None)
        if scale is None:
            return codes, stored
        zero_point, steps = self.plain.split(stored)
        broken = steps.isnan()
        zero_point = zero_point.masked_fill(broken, 0.0)[..., 0]
        steps = steps.masked_fill(broken, 1.0)[..., 0]
        y = rotate(widen(x)).masked_fill_(broken, 0.0)
        wanted, found = y.clone(), torch.empty_like(y)
        for i in range(y.shape[-1]):
            code = ((wanted[..., i] / steps).round_() + zero_point).clamp_(0.0, STEPS)
            found[..., i] = code
            error = y[..., i] - (code - zero_point) * steps
            wanted += error[..., None] * scale[:, i]
        return packed.pack(found.masked_fill_(broken, 0.0), 4), stored

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        return self.plain.decode(planes, None, dtype)

    def decode_rotated(self, planes: Sequence[Tensor]) -> Tensor:
        """Decodes planes to rotated rows, float32 [..., num_kv_heads, head_dim], as `RotatedInt4Codec`."""
        return self.plain.decode_rotated(planes)


def codec(fmt: KVFormat) -> Codec:
    return FeedbackInt4Codec(RotatedInt4Codec())
