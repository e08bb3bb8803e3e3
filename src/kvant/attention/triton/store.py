"""The writer: rows of K and V, encoded, into their slots; one launch for both sides."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.codec import (
    BFLOAT16,
    CODEBOOK3,
    CODEBOOK4,
    E4M3,
    FLOAT16,
    FLOAT32,
    INT8,
    NO_SCALE,
    ROW_MINIMUM,
    ROW_ZERO,
    UINT3,
)
from kvant.attention.triton.encode import (
    LEAST,
    NAN_BITS,
    NAN_HALF,
    bfloat16,
    bound,
    codebook_codes,
    divide,
    float8_code,
    has_nan,
    nearest,
    nvfp4_codes,
    pack_nibbles,
    pack_threes,
    row_scale,
    smallest_first_codes,
    widen,
)
from kvant.attention.triton.rotation import hadamard


@triton.jit
def _store_packed(
    codes, row, there, code, HEAD: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Codes [ROWS, PAD] of 4 or 3 bits into rows of HEAD of them."""
    if BITS == 4:
        packed = pack_nibbles(code, ROWS, PAD)
        b = tl.arange(0, PAD // 2)
        tl.store(codes + row[:, None] * (HEAD // 2) + b[None, :], packed.to(tl.uint8),
                 mask=there[:, None] & (b < HEAD // 2)[None, :])  # fmt: skip
    else:
        packed = pack_threes(code, ROWS, PAD)
        b = tl.arange(0, PAD // 8)
        mask = there[:, None] & (b < HEAD // 8)[None, :]
        at = codes + row[:, None] * (HEAD * 3 // 8) + 3 * b[None, :]
        for i in tl.static_range(3):
            tl.store(at + i, ((packed >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def encode_rows(
    x, row, head, there, codes, scales, outer_ptr, count_ptr,
    MOST: tl.constexpr, KIND: tl.constexpr, SCALING: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROTATION: tl.constexpr, ROWS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """x [ROWS, PAD], zeros beyond HEAD and where not there, into rows of the planes."""
    c = tl.arange(0, PAD)
    mask = there[:, None] & (c < HEAD)[None, :]
    if MOST > 0:
        reach = tl.full((ROWS,), MOST, tl.float32)
        if OUTER > 0:
            reach *= tl.load(outer_ptr + head * (OUTER - 1))
        beyond = tl.sum((tl.abs(x.to(tl.float32)) > reach[:, None]).to(tl.int32))
        if beyond > 0:
            tl.atomic_add(count_ptr, beyond.to(tl.int64), sem="relaxed")
    if KIND == FLOAT32 or KIND == FLOAT16 or KIND == BFLOAT16:
        target = codes.dtype.element_ty
        if x.dtype != target and KIND == FLOAT16:
            x = bound(x.to(tl.float32), -65504.0, 65504.0)
        elif x.dtype != target and KIND == BFLOAT16:
            x = bfloat16(x.to(tl.float32))
        tl.store(codes + row[:, None] * HEAD + c[None, :], x.to(target), mask=mask)
    elif KIND == CODEBOOK4 or KIND == CODEBOOK3:
        bits: tl.constexpr = 4 if KIND == CODEBOOK4 else 3
        broken = has_nan(x)
        y = tl.where(broken[:, None], 0.0, widen(x))
        unit = tl.max(tl.abs(y), 1).to(tl.int32, bitcast=True) & 0x7F800000
        unit = unit.to(tl.float32, bitcast=True)
        unit = tl.where(unit < LEAST, LEAST, unit)
        y = divide(y, unit[:, None] + 0.0 * tl.zeros_like(y), PTX)
        y = hadamard(y, ROWS, PAD, ROTATION)
        code, scale = codebook_codes(y, unit, HEAD, ROWS, PAD, bits, PTX)
        code = tl.where(broken[:, None], 0, code)
        _store_packed(codes, row, there, code, HEAD, ROWS, PAD, bits)
        scale = tl.where(broken, NAN_HALF, scale.to(tl.int16, bitcast=True))
        tl.store(scales + row, scale.to(tl.int16), mask=there)
    elif SCALING == ROW_MINIMUM:
        bits: tl.constexpr = 3 if KIND == UINT3 else 4
        broken = has_nan(x)
        y = tl.where(broken[:, None], 0.0, widen(x))
        code, scale, low = smallest_first_codes(y, (c < HEAD)[None, :], bits, ROWS, PAD, PTX)
        _store_packed(codes, row, there, code, HEAD, ROWS, PAD, bits)
        scale = tl.where(broken, NAN_HALF, scale.to(tl.int16, bitcast=True))
        tl.store(scales + 2 * row, scale.to(tl.int16), mask=there)
        tl.store(scales + 2 * row + 1, low.to(tl.int16, bitcast=True), mask=there)
    elif SCALING == ROW_ZERO:
        broken = has_nan(x)
        y = hadamard(tl.where(broken[:, None], 0.0, widen(x)), ROWS, PAD, ROTATION)
        low = tl.minimum(tl.min(y, 1), 0.0)
        high = tl.maximum(tl.max(y, 1), 0.0)
        scale = row_scale(high - low, 15.0, PTX)
        bits = (scale.to(tl.int32, bitcast=True) + 4096) & -8192
        scale = bits.to(tl.float32, bitcast=True)
        zero = bound(nearest(divide(0.0 - low, scale, PTX)), 0.0, 15.0)
        steps = nearest(divide(y, scale[:, None] + 0.0 * tl.abs(y), PTX))
        code = bound(steps + zero[:, None], 0.0, 15.0).to(tl.int32)
        code = tl.where(broken[:, None], 0, code)
        _store_packed(codes, row, there, code, HEAD, ROWS, PAD, 4)
        tl.store(scales + row, tl.where(broken, NAN_BITS, bits | zero.to(tl.int32)), mask=there)
    elif SCALING == NO_SCALE or KIND == E4M3 or KIND == INT8:
        broken = has_nan(x)
        y = widen(x)
        if OUTER > 0:
            outer = tl.load(outer_ptr + head * (OUTER - 1))
            y = divide(y, outer[:, None] + 0.0 * tl.zeros_like(y), PTX)
        if SCALING != NO_SCALE:
            steps: tl.constexpr = 127.0 if KIND == INT8 else 448.0
            y = tl.where(broken[:, None], 0.0, y)
            scale = row_scale(tl.max(tl.abs(y), 1), steps, PTX)
            y = divide(y, scale[:, None] + 0.0 * tl.zeros_like(y), PTX)
            bits = tl.where(broken, NAN_BITS, scale.to(tl.int32, bitcast=True))
            tl.store(scales + row, bits, mask=there)
        if KIND == INT8:
            code = bound(nearest(y), -127.0, 127.0).to(tl.int32) & 0xFF
        else:
            code = float8_code(y, KIND)
            if SCALING != NO_SCALE:
                code = tl.where(broken[:, None], 0x7F, code)
        tl.store(codes + row[:, None] * HEAD + c[None, :], code.to(tl.uint8), mask=mask)
    else:
        tl.static_assert(OUTER > 0)
        outer = tl.load(outer_ptr + head * (OUTER - 1))
        outer = tl.broadcast_to(outer[:, None], (ROWS, PAD // 16))
        code, block = nvfp4_codes(
            widen(x), tl.reshape(outer, (ROWS * (PAD // 16),)), ROWS, PAD, PTX
        )
        _store_packed(codes, row, there, code, HEAD, ROWS, PAD, 4)
        s = tl.arange(0, PAD // 16)
        tl.store(scales + row[:, None] * (HEAD // 16) + s[None, :], block.to(tl.uint8),
                 mask=there[:, None] & (s < HEAD // 16)[None, :])  # fmt: skip


@triton.jit
def _store_rows(
    x_ptr, stride_token, stride_head, codes, scales, outer_ptr, slot_mapping, num_rows, count_ptr,
    MOST: tl.constexpr, KIND: tl.constexpr, SCALING: tl.constexpr, OUTER: tl.constexpr, HEADS: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROTATION: tl.constexpr, ROWS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = r < num_rows
    token = r // HEADS
    head = r % HEADS
    slot = tl.load(slot_mapping + token, mask=there, other=-1)
    there = there & (slot >= 0)
    row = slot * HEADS + head
    c = tl.arange(0, PAD)
    mask = there[:, None] & (c < HEAD)[None, :]
    at = token.to(tl.int64) * stride_token + head * stride_head
    x = tl.load(x_ptr + at[:, None] + c[None, :], mask=mask, other=0.0)
    encode_rows(x, row, head, there, codes, scales, outer_ptr, count_ptr, MOST, KIND, SCALING,
                OUTER, HEAD, PAD, ROTATION, ROWS, PTX)  # fmt: skip


@triton.jit(do_not_specialize=("num_rows",))
def store_rows(
    k, k_stride_token, k_stride_head, k_codes, k_scales, k_outer,
    v, v_stride_token, v_stride_head, v_codes, v_scales, v_outer,
    slot_mapping, num_rows, counts, MOST_K: tl.constexpr, MOST_V: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
    KIND_K: tl.constexpr, SCALING_K: tl.constexpr, OUTER_K: tl.constexpr,
    HEAD_K: tl.constexpr, PAD_K: tl.constexpr, ROTATION_K: tl.constexpr,
    KIND_V: tl.constexpr, SCALING_V: tl.constexpr, OUTER_V: tl.constexpr,
    HEAD_V: tl.constexpr, PAD_V: tl.constexpr, ROTATION_V: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows, side). A row is one token and KV head; num_rows = tokens * HEADS.

    counts: int64 [2], of values of K and V beyond MOST times their outside scale; MOST 0: not counted.
    """
    if tl.program_id(1) == 0:
        _store_rows(
            k, k_stride_token, k_stride_head, k_codes, k_scales, k_outer, slot_mapping, num_rows,
            counts, MOST_K, KIND_K, SCALING_K, OUTER_K, HEADS, HEAD_K, PAD_K, ROTATION_K, ROWS, PTX,
        )  # fmt: skip
    else:
        v_counts = counts
        if MOST_V > 0:
            v_counts = counts + 1
        _store_rows(
            v, v_stride_token, v_stride_head, v_codes, v_scales, v_outer, slot_mapping, num_rows,
            v_counts, MOST_V, KIND_V, SCALING_V, OUTER_V, HEADS, HEAD_V, PAD_V, ROTATION_V, ROWS, PTX,
        )  # fmt: skip
