"""Recurrent states in their stored format, as Triton kernels read and write them.

The format's declaration chooses the functions, as in `kvant.attention.triton.format`. A row is the numbers of
one value; it has its own scale, like a row of one token and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kvant.attention.triton.format import Format, format_of
from kvant.attention.triton.launch import stores, words
from kvant.kernels.triton.device import has_ptx
from kvant.kv.state_pool import StateCache


@dataclass(frozen=True, slots=True)
class Stored:
    """The states of one layer.

    words, codes: views of one memory [num_rows, heads, values, ..], rows of any stride. scales, bits: float32
    and int32 views of one memory [num_rows, heads, values, 1]; None without scales. shape: heads, values and
    keys.
    """

    words: Tensor
    codes: Tensor
    scales: Tensor | None
    bits: Tensor | None
    shape: tuple[int, int, int]
    format: Format

    @staticmethod
    def of(cache: StateCache) -> Stored:
        format = format_of(cache.spec.choice.dtype)
        read, scales = words(cache.planes, format)
        codes, bits = stores(cache.planes)
        heads, values, keys = cache.spec.geometry.shape
        return Stored(read, codes, scales, bits, (heads, values, keys), format)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of kernels: words, codes, scales, bits, and the row strides of codes and of scales."""
        apart = 0 if self.scales is None else self.scales.stride(0)
        return self.words, self.codes, self.scales, self.bits, self.codes.stride(0), apart

    @property
    def constants(self) -> dict[str, Any]:
        heads, values, keys = self.shape
        return {
            "HEADS": heads, "VALUES": values, "KEYS": keys, "FORMAT": self.format,
            "PTX": has_ptx(self.codes.device),
        }  # fmt: skip


@triton.jit
def load_state(
    words, scales, stride, scale_stride, page, r, there, FORMAT: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Loads rows r [ROWS] of a page's state as float32 [ROWS, WIDE].

    Zeros where not `there` and past KEYS.
    """
    ELEMENTS: tl.constexpr = FORMAT.elements
    WORDS: tl.constexpr = WIDE // ELEMENTS
    j = tl.arange(0, WORDS)
    at = words + page * (stride // ELEMENTS) + r * (KEYS // ELEMENTS)
    inside = there[:, None] & (j < KEYS // ELEMENTS)[None, :]
    found = tl.load(at[:, None] + j[None, :], mask=inside, other=0)
    if ELEMENTS == 1:
        numbers = found.to(tl.float32)
    else:
        FACTOR: tl.constexpr = FORMAT.factor
        BIAS: tl.constexpr = FORMAT.bias
        scale, _ = FORMAT.row_scale(scales + page * scale_stride + r, there)
        low, high = FORMAT.decode(found, PTX)
        both = tl.join(low.to(tl.float32), high.to(tl.float32))
        numbers = (tl.reshape(both, (ROWS, WIDE)) * FACTOR - BIAS) * scale[:, None]
    return numbers


@triton.jit
def store_state(
    x, codes, bits, stride, scale_stride, page, r, there, FORMAT: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Stores x [ROWS, WIDE], float32 with zeros past KEYS, in rows r of a page's state, where `there`."""
    to = codes + page * stride + r * KEYS
    if FORMAT.elements == 1:
        k = tl.arange(0, WIDE)
        inside = there[:, None] & (k < KEYS)[None, :]
        tl.store(to[:, None] + k[None, :], x.to(codes.dtype.element_ty), mask=inside)
    else:
        scale_to = bits + page * scale_stride + r
        FORMAT.encode(x, r, there, to, scale_to, None, FORMAT, 0, KEYS, WIDE, ROWS, PTX)
