"""A KV format as Triton kernels take it: one compile-time argument with functions and facts.

The facts come from the format's declaration in `kvant.kv.dtype`, the functions from its file in
`kvant.attention.triton.formats`. Kernels call them by attribute, `FORMAT.decode(..)`, and branch on the
facts at compile time.

Codes are loaded as *words*. 16-bit formats and float32 have one element per word. A 16-bit word holds two
8-bit, four 4-bit or eight 2-bit elements. Eight 3-bit elements make a word of 24 bits, loaded from units of
32 bits.
Tensor cores take 16-bit operands and `ldmatrix` moves 16-bit units, so a word travels from page to
register without a shuffle. There `decode` makes one operand tensor for each element of a word: element e
of word j is number elements * j + e of the row. A product over a row is a sum of `elements` products, and
an output has `elements` accumulators.

Decoding costs one instruction per element or less, because scales are applied elsewhere: a scale per row
multiplies the scores (keys) or the probabilities (values). Zero points and minima are rank-1 terms:
q . (n - z) = q . n - z * sum(q).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

import torch
import triton.language as tl

from kvant.attention.triton.words import load_24_bit_words, load_words
from kvant.kv.codecs import TORCH_ELEMENT
from kvant.kv.codecs.float8 import FLOAT8, Float8
from kvant.kv.dtype import KVDtype
from kvant.kv.format import (
    Encoding,
    Granularity,
    KVFormat,
    Packing,
    Rotation,
    ScalePlace,
    ZeroPoint,
)

_OPERANDS = {Encoding.FLOAT32: tl.float32, Encoding.BFLOAT16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The contents of a format's file; the functions are `triton.jit` functions.

    decode(words, PTX): returns the elements of words, a tuple of tensors of the words' shape in the type of
        `Format.operand`. PTX: whether inline assembly for NVIDIA sm_89 and later can be used.
    encode(x, head, there, codes, scales, outer, FORMAT, OUTER, HEAD, PAD, ROWS, PTX): stores rows x
        [ROWS, PAD] at `codes`, and their scales at `scales`, pointers [ROWS], where `there` [ROWS].
    row_scale(pointer, there): returns (scale, zero point or minimum) of rows, float32 [rows], as pointer.
    block_scale(codes, PTX): returns float16 factors of the blocks' scale codes.
    factor, bias: number = decoded * factor - bias, before the row's scale.
    even: decoded elements at even places of a word are smaller than at odd places by this factor.
    """

    decode: Any
    encode: Any
    row_scale: Any = None
    block_scale: Any = None
    factor: float = 1.0
    bias: float = 0.0
    even: float = 1.0


@dataclass(frozen=True, eq=False)
class Format:
    """A format as a compile-time argument of kernels; functions and numbers of `Kernels` as there.

    elements: numbers per word. word, scale_word: torch dtypes as which the planes are viewed. word_bits:
    bits of the units that words are loaded from. operand: Triton type of decoded elements. per_row,
    per_block: which scales are in the pages. zero_point, minimum: what is stored with a row's scale. block:
    numbers per block scale. float8: the 8-bit float of codes, or of block scales.
    """

    name: str
    bits: int
    elements: int
    word: torch.dtype
    word_bits: int
    scale_word: torch.dtype | None
    operand: Any
    rotated: bool
    per_row: bool
    per_block: bool
    zero_point: bool
    minimum: bool
    block: int
    float8: Float8 | None
    load: Any
    decode: Any
    encode: Any
    row_scale: Any
    block_scale: Any
    factor: float
    bias: float
    even: float

    def __repr__(self) -> str:
        """Returns the name; Triton includes it in the names of compiled functions."""
        return self.name

    @property
    def cache_key(self) -> str:
        """Identity for Triton's cache on disk: all facts, and the sources of all functions."""
        values = [getattr(self, field.name) for field in fields(self)]
        parts = [str(getattr(value, "cache_key", value)) for value in values]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()


class _FormatModule(Protocol):
    def kernels(self, declared: KVFormat) -> Kernels: ...


@cache
def format_of(dtype: KVDtype) -> Format:
    """Returns the format for kernels; its file is imported on first use."""
    declared = dtype.format
    name = f"kvant.attention.triton.formats.{declared.codec}"
    given = cast(_FormatModule, import_module(name)).kernels(declared)
    in_bits = declared.packing is Packing.BITS
    word = (
        TORCH_ELEMENT[declared.element]
        if declared.is_native
        else torch.int32
        if in_bits
        else torch.int16
    )
    in_pages = declared.scale_place is ScalePlace.PLANE
    return Format(
        name=declared.name,
        bits=declared.bits,
        elements=8 if in_bits else max(1, 16 // declared.bits),
        word=word,
        word_bits=8 * word.itemsize,
        scale_word=_scale_word(declared) if in_pages else None,
        operand=_OPERANDS.get(declared.encoding, tl.float16),
        rotated=declared.rotation is Rotation.HADAMARD,
        per_row=in_pages and declared.granularity is Granularity.TOKEN_HEAD,
        per_block=in_pages and declared.granularity is Granularity.BLOCK,
        zero_point=declared.zero_point is not ZeroPoint.NONE,
        minimum=not declared.symmetric and declared.zero_point is ZeroPoint.NONE,
        block=declared.block,
        float8=FLOAT8.get(declared.encoding) or FLOAT8.get(cast(Encoding, declared.scale_encoding)),
        load=load_24_bit_words if in_bits else load_words,
        decode=given.decode,
        encode=given.encode,
        row_scale=given.row_scale,
        block_scale=given.block_scale,
        factor=given.factor,
        bias=given.bias,
        even=given.even,
    )


def _scale_word(declared: KVFormat) -> torch.dtype:
    """Returns a dtype that holds all scales of a row, or the scale of a block."""
    if declared.scale_encoding is Encoding.E4M3FN:
        return torch.uint8
    if declared.scale_encoding is Encoding.SHORT:
        return torch.int16
    if declared.scales_per_row == 2 or declared.zero_point is not ZeroPoint.NONE:
        return torch.int32
    return torch.float16 if declared.scale_encoding is Encoding.FLOAT16 else torch.float32
