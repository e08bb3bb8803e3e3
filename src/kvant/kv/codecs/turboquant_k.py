"""turboquant_k4 and turboquant_k3: rotated rows in a codebook for normal numbers, a float16 scale a row.

    u      = 2^floor(log2(absmax(x))), at least 2^-126
    y      = rotate(x / u)                        see kvant.kv.codecs.rotation
    z      = (y * sqrt(D)) / r,  r = sqrt(sum of y^2)      so that z is about standard normal
    code   = nearest centroid to z                see kvant.kv.codecs.codebook
    scale  = float16((r / sqrt(sum of centroid[code]^2)) * u), saturating at 65504
    value  = rotate(centroid[code] * scale) / B

The scale gives the decoded row the length of x: what the codebook takes from a row's length is put
back when it is stored, once. Sums of squares are float32 and add neighbours, then neighbours of
these, and so on (an odd last one waits). A row of zeros has scale 0 and codes 0; a row that contains
NaN has scale NaN (0x7e00) and codes 0. sqrt(D) is rounded to float32.

After TurboQuant (arXiv:2504.19874) as vLLM has it under the names turboquant_*_nc, whose bytes differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvant.kv.codecs import Codec, packed
from kvant.kv.codecs.codebook import CENTROIDS_3BIT, CENTROIDS_4BIT, middles
from kvant.kv.codecs.conversion import MIN_ROW_SCALE, narrow, widen
from kvant.kv.codecs.rotation import rotate, unrotate
from kvant.kv.format import KVFormat

_EXPONENT = 0x7F800000
_HALF_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class NormalCodebookCodec:
    bits: int
    centroids: tuple[float, ...]

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        assert scale is None
        row = normalised(x)
        codes = (row.z < 0).to(torch.uint8) << (self.bits - 1)
        size = row.z.abs()
        for middle in middles(self.centroids):
            codes += size > middle
        found = _values(self.centroids, x.device)[codes.to(torch.int64)]
        return packed.pack(codes, self.bits), _scale_of(row, found)

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        assert scale is None
        codes, scales = planes
        found = packed.look_up(codes, _values(self.centroids, codes.device), self.bits)
        return narrow(unrotate(found * scales.to(torch.float32)), dtype)


@dataclass(frozen=True, slots=True)
class Normalised:
    """Rows as about standard normal numbers z [.., head_dim], and their lengths: root * unit.

    root, unit: float32 [.., 1]. broken: bool [.., 1], rows with NaN, which are zeros here.
    """

    z: Tensor
    root: Tensor
    unit: Tensor
    broken: Tensor


def normalised(x: Tensor) -> Normalised:
    """Rows x [.., head_dim], rotated."""
    x = widen(x)
    largest = x.abs().amax(-1, keepdim=True)
    broken = largest.isnan()
    x = x.masked_fill(broken, 0.0)
    bits = largest.masked_fill(broken, 0.0).view(torch.int32) & _EXPONENT
    unit = bits.view(torch.float32).clamp(min=MIN_ROW_SCALE)
    y = rotate(x / unit)
    root = _root(sum_of_squares(y))
    z = ((y * root_of_width(y)) / root).masked_fill_(root == 0, 0.0)
    return Normalised(z, root, unit, broken)


def root_of_width(x: Tensor) -> Tensor:
    """sqrt(head_dim) of rows x [.., head_dim], float32 []."""
    return torch.full((), math.sqrt(x.shape[-1]), dtype=torch.float32, device=x.device)


def _scale_of(row: Normalised, found: Tensor) -> Tensor:
    """Returns float16 scales [.., 1] that give `found` [.., head_dim], decoded numbers, the row's length."""
    length = (row.root / _root(sum_of_squares(found))) * row.unit
    return half_scales(length, row.broken)


def half_scales(scales: Tensor, broken: Tensor) -> Tensor:
    """float16 of scales [.., 1], float32, saturating; NaN where broken, bool [.., 1]."""
    found = scales.clamp(max=_HALF_MAX).to(torch.float16)
    # NaN is written as float16: converted from float32 it is 0x7fff on CUDA.
    return found.masked_fill_(broken, float("nan"))


@cache
def _values(centroids: tuple[float, ...], device: torch.device) -> Tensor:
    """float32: the number that each code means. Kept: graphs cannot copy it from the host."""
    return torch.tensor(centroids, dtype=torch.float32, device=device)


def sum_of_squares(x: Tensor) -> Tensor:
    """x [.., n] float32 to [.., 1], in the order of the definition."""
    return sum_in_pairs(x * x)


def sum_in_pairs(sums: Tensor) -> Tensor:
    """[.., n] float32 to [.., 1]: adds neighbours, then neighbours of these sums."""
    while sums.shape[-1] > 1:
        even = sums.shape[-1] // 2 * 2
        added = sums[..., 0:even:2] + sums[..., 1:even:2]
        sums = torch.cat((added, sums[..., even:]), dim=-1)
    return sums


def _root(x: Tensor) -> Tensor:
    """Returns the square root, correctly rounded; torch's own in float32 is not, on some CPUs."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def codec(fmt: KVFormat) -> Codec:
    return NormalCodebookCodec(fmt.bits, CENTROIDS_4BIT if fmt.bits == 4 else CENTROIDS_3BIT)
