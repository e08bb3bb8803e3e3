"""Launch shapes: how large the tiles are.

Numbers are from the H200; docs/benchmarks/attention.md has the log.
"""

from __future__ import annotations

from math import ceil

from kvant.attention.launching import Shape
from kvant.attention.triton.format import format_of
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Encoding


def shape_for(
    k: KVDtype,
    v: KVDtype,
    head_dims: tuple[int, int],
    rows: int,
    *,
    full: bool,
    crowd: float = 1.0,
    single: bool = False,
) -> Shape:
    """Returns the shape for `rows` query rows of one sequence and KV head. head_dims: of K and V.

    full: float32 products. crowd: sequences times KV heads, divided by the number of multiprocessors. If it
    is small, every sequence is split often, and larger programs with fewer parts to join are faster.
    single: every sequence has one query.
    """
    a, b = format_of(k), format_of(v)
    codes = k.format.encoding, v.format.encoding
    head_dim = max(head_dims)
    if full or Encoding.FLOAT32 in codes:
        return Shape(16, 16, 4, 2, 2)
    if rows <= 16:
        if head_dim > 256:
            return Shape(16, 32, 4, 2, 2)
        if head_dim > 128 and a.elements == b.elements == 1 and crowd > 0.1:
            # Two warps would hold 255 registers each; the third stage hides more of the memory's latency. A
            # launch for one sequence is faster alone, too, but steps of one request were slower.
            return Shape(16, 32, 4, 3, 2)
        if head_dim > 128:
            return Shape(16, 32, 2, 2, 4)
        if a.elements == b.elements == 1:
            return _native_row(crowd, single=single)
        if codes == (Encoding.E4M3FN, Encoding.E4M3FN) and crowd <= 1 / 16:
            return Shape(16, 128, 4, 2, 3)
        # One byte per element in both: six programs lose most of their advantage otherwise.
        programs = _six_or_eight(crowd, 1.2) if a.elements == b.elements == 2 else 8
        # Words of 16 bits in both; eight elements of 3 bits have longer words.
        short = a.word_bits == b.word_bits == 16 and min(a.elements, b.elements) >= 4
        # Small tiles read 8 bits faster if there are many whole sequences. Parts of sequences, and queries of
        # prompts beside them, would need more kernels to be warm.
        is_crowded = single and a.elements == b.elements == 2 and crowd >= 8
        if short or (Encoding.E4M3FN in codes and not is_crowded):
            return Shape(16, 64, 1, 2, programs)
        return Shape(16, 32, 1, 2, programs)
    if head_dim > 128:
        return Shape(32, 32, 4, 2, 2)
    if Encoding.FLOAT16 in (k.format.scale_encoding, v.format.scale_encoding):
        return Shape(32, 32, 1, 2, 8)
    # Not 64 rows if a row of K or V has at most 32 words: Triton 3.6 then multiplies with wgmma, and reads
    # its operand of 32 columns past the end of shared memory.
    narrow = min(head_dims[0] // a.elements, head_dims[1] // b.elements) <= 32
    if rows <= 32 or (narrow and 4 not in (a.elements, b.elements)):
        return Shape(32, 64, 4, 2, 2)
    if 4 in (a.elements, b.elements):
        # Not 64 rows: 128 numbers are 32 words.
        if Encoding.E2M1 in codes:
            return Shape(32, 32, 1, 2, 8)
        return Shape(32, 64, 2, 3, 4)
    native = a.elements == b.elements == 1
    return Shape(64, 64, 4, 3, 2) if native else Shape(64, 128, 4, 2, 1)


def latent_shape(k: KVDtype, *, full: bool) -> Shape:
    """Returns the shape for latents. full: as in `shape_for`.

    On an H200 it read 64 x 8192 bfloat16 rows of 512 + 64 at 77 % of the memory bandwidth for 16 heads.
    """
    if full or k.format.encoding is Encoding.FLOAT32:
        return Shape(16, 16, 4, 1, 1)
    return Shape(16, 32, 4, 3, 2) if k.format.is_native else Shape(16, 32, 4, 2, 2)


def _native_row(crowd: float, *, single: bool) -> Shape:
    """Returns the shape for 16-bit caches and up to 16 rows. crowd, single: as in `shape_for`."""
    if crowd <= 0.1:  # there are many parts, and joining them takes most of the time
        return Shape(16, 64, 4, 2, 3)
    if single and 1.6 <= crowd <= 2:  # two programs per multiprocessor, with a whole sequence each
        return Shape(16, 128, 4, 2, 2, masked=True)
    # Eight programs that are as busy as six wait a little longer for memory.
    return Shape(16, 32, 1, 2, _six_or_eight(crowd, 0.965))


def _six_or_eight(crowd: float, gain: float) -> int:
    """Returns programs per multiprocessor: six if they are at least `gain` times as busy as eight."""

    def busy(programs: int) -> float:
        """Returns the share of time that programs work, if equal sequences are split into equal parts."""
        parts = max(1, programs // crowd)
        return parts * crowd / (programs * max(1, ceil(crowd / programs)))

    return 6 if crowd <= 6 and busy(6) >= gain * busy(8) else 8


def dense_shape(head_dim: int, *, causal: bool) -> Shape:
    """Returns the shape of `dense_attention`, which ignores programs and least."""
    if head_dim > 128:
        return Shape(128, 64, 8, 2, 1)
    if head_dim < 128:
        return Shape(64, 128, 4, 3, 2)
    return Shape(64, 64, 4, 3, 2) if causal else Shape(128, 128, 8, 3, 1)


def dense_bytes(head_dim: int, *, causal: bool) -> int:
    """Returns the shared memory in bytes of a `dense_attention` program on Hopper, up to 1 KiB too low.

    It holds queries, and keys and values of the tiles in flight. Other devices use less.
    """
    shape = dense_shape(head_dim, causal=causal)
    return 2 * head_dim * (shape.rows + 2 * shape.stages * shape.tile)
