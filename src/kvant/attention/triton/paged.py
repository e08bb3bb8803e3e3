"""The attention kernel: a block of query rows against a range of one sequence's keys.

Rows are (query, head of the group) pairs of one KV head, so the kernel reads K and V once for all of them.
It computes an online softmax in base 2. Scores stay *raw*: the row's factor (softmax scale, outer key scale
and normalisation of the query) enters together with the exponential, in one fused multiply-add.

A layer with wide rows (`kvant.kv.spec.WideRows`) takes two launches if `both_attention` does not serve
the step. The first launch reads the narrow form of the keys between the first ones and the latest, and leaves
float32 rows with their log-sum-exp. The second reads the other keys in their wide form and joins both.

Products with 8- and 4-bit keys are float16. The query is divided by its row's largest magnitude, so that
nothing overflows. Probabilities times value scales are divided by the largest value scale so far and stay
below 2^15, which leaves 29 bits of range for rows of small scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.attention.triton.rotation import hadamard
from kvant.attention.triton.words import in_order
from kvant.attention.triton.workmap import find_item, listed, tiles_per_split

LOWEST = tl.constexpr(-1.0e30)
HEADROOM = tl.constexpr(32768.0)
LOG2E = tl.constexpr(1.4426950408889634)
NARROW = tl.constexpr(1)  # the form of keys between the first ones and the latest
WIDE = tl.constexpr(2)  # the form of the other keys, whose rows are stored a second time
SMALL = tl.constexpr(2.0**-100)  # minimum reference for value scales: HEADROOM / SMALL is finite


@triton.jit
def operand(x, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """Converts x to the operand type of this format's products; float32 if FULL."""
    return x.to(tl.float32 if FULL else FORMAT.operand)


@triton.jit
def elements(words, scales, FORMAT: tl.constexpr, FULL: tl.constexpr, PTX: tl.constexpr):
    """Decodes the elements of a tile of words, and applies block scales."""
    found = FORMAT.decode(words, PTX)
    parts = ()
    for e in tl.static_range(len(found)):
        part = found[e]
        if FORMAT.per_block:
            part = part * scales
        if FULL:
            part = part.to(tl.float32)
        parts = parts + (part,)
    return parts


@triton.jit
def places(at, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Returns page table columns and offsets in the page, [TILE] each, of tokens from `at` on.

    At % TILE == 0.
    """
    n = tl.arange(0, TILE)
    if TILE % PAGE == 0:
        return at // PAGE + n // PAGE, n % PAGE
    elif PAGE % TILE == 0:
        return at // PAGE + 0 * n, at % PAGE + n
    else:
        return (at + n) // PAGE, (at + n) % PAGE


@triton.jit
def page_ids(pages, at, end, TILE: tl.constexpr, PAGE: tl.constexpr):
    column, _ = places(at, TILE, PAGE)
    return tl.load(pages + column, mask=at + tl.arange(0, TILE) < end, other=0)


@triton.jit
def row_at(pointer, page, small, page_units, WIDTH: tl.constexpr):
    """Returns pointers to rows of WIDTH elements in a plane.

    pointer: the row of head 0 and offset 0 in page 0. small: (offset in page) * HEADS + head. page_units:
    see `launch.page_units`.
    """
    PER_UNIT: tl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
    return pointer + (page.to(tl.int64) * (page_units * PER_UNIT) + small * WIDTH)


@triton.jit
def _block_scales(
    pointer, page, small, there, page_units, FORMAT: tl.constexpr, HEAD: tl.constexpr,
    WORDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Loads block scales of rows as float16, spread over the words: [rows, WORDS]."""
    PER: tl.constexpr = FORMAT.block // FORMAT.elements  # words of a block
    SLOTS: tl.constexpr = WORDS // PER
    BLOCKS: tl.constexpr = HEAD // FORMAT.block
    row = row_at(pointer, page, small, page_units, BLOCKS)
    b = tl.arange(0, SLOTS)
    mask = there[:, None] & (b < BLOCKS)[None, :]
    code = tl.load(row[:, None] + b[None, :], mask=mask, other=0)
    s = FORMAT.block_scale(code, PTX)
    s = tl.broadcast_to(s[:, :, None], (s.shape[0], SLOTS, PER))
    return tl.reshape(s, (s.shape[0], WORDS))


@triton.jit
def _tile(
    state, q, q_sum, factor, cap, at, next_at, start, end, row_lo, row_hi, sink,
    k_codes, k_scales, v_codes, v_scales, shifts, page_units, pages, head,
    TILE: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    K: tl.constexpr, HEAD_K: tl.constexpr, PAD_K: tl.constexpr,
    V: tl.constexpr, HEAD_V: tl.constexpr, PAD_V: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, FULL: tl.constexpr, FIXED: tl.constexpr,
    PTX: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys and values to the state. next_at: begin of the next tile.

    state: accumulators, max, sum, sum times zero points or minima, largest value scale, page ids of the
    tile.
    """
    acc, top, den, zeros, reference, page = state
    _, offset = places(at, TILE, PAGE)
    if MASKED:
        pos = at + tl.arange(0, TILE)
        there = (pos >= start) & (pos < end)
        if FORM == WIDE:
            there |= pos < tl.minimum(sink, end)
    else:
        there = tl.full((TILE,), True, tl.int1)
    small = offset * HEADS + head
    jk = tl.arange(0, PAD_K)
    jv = tl.arange(0, PAD_V)
    WORDS_K: tl.constexpr = HEAD_K // K.elements
    WORDS_V: tl.constexpr = HEAD_V // V.elements
    UNITS_K: tl.constexpr = HEAD_K * K.bits // K.word_bits
    UNITS_V: tl.constexpr = HEAD_V * V.bits // V.word_bits
    k = K.load(
        row_at(k_codes, page, small, page_units, UNITS_K)[:, None], jk,
        there[:, None] & (jk < WORDS_K)[None, :], shifts, MASKED or PAD_K != WORDS_K, PTX,
    )  # fmt: skip
    v = V.load(
        row_at(v_codes, page, small, page_units, UNITS_V)[:, None], jv,
        there[:, None] & (jv < WORDS_V)[None, :], shifts, MASKED or PAD_V != WORDS_V, PTX,
    )  # fmt: skip

    # Loads the pages of the next tile, so that loads of keys and values never wait for a page id.
    next_page = page_ids(pages, next_at, end, TILE, PAGE)

    block = 0.0
    if K.per_block:
        block = _block_scales(k_scales, page, small, there, page_units, K, HEAD_K, PAD_K, PTX)
    parts = elements(k, block, K, FULL, PTX)
    x = tl.dot(q[0], tl.trans(parts[0]), input_precision="ieee")
    for e in tl.static_range(1, len(parts)):
        x = tl.dot(q[e], tl.trans(parts[e]), x, input_precision="ieee")
    if K.per_row:
        scale, zero = K.row_scale(row_at(k_scales, page, small, page_units, 1), there)
        if K.zero_point:
            x -= q_sum[:, None] * zero[None, :]
        elif K.bias > 0:
            x -= q_sum[:, None] * K.bias
        x *= scale[None, :]
        if K.minimum:
            x += q_sum[:, None] * zero[None, :]
    if SOFTCAP:
        # cap * tanh(y / cap) with tanh(z) = 1 - 2 / (exp(2 z) + 1); the factor becomes log2(e)
        x = cap * (1.0 - 2.0 / (tl.exp2(x * (factor * (2.0 * LOG2E / cap))[:, None]) + 1.0))
        inner = LOG2E + 0.0 * factor
    else:
        inner = factor
    if MASKED:
        ok = pos[None, :] >= row_lo[:, None]
        if FORM == WIDE:
            ok |= (pos < sink)[None, :]
        ok &= there[None, :] & (pos[None, :] < row_hi[:, None])
        x = tl.where(ok, x, LOWEST)
    new_top = tl.maximum(top, tl.max(x, 1))
    p = tl.exp2(x * inner[:, None] - (new_top * inner)[:, None])
    if MASKED:
        p = tl.where(ok, p, 0.0)
    fade = tl.exp2((top - new_top) * inner)
    den = den * fade + tl.sum(p, 1)

    if V.per_row:
        scale, zero = V.row_scale(row_at(v_scales, page, small, page_units, 1), there)
        if V.minimum:
            zeros = zeros * fade + tl.sum(p * zero[None, :], 1)
        if FIXED:
            # Every row uses only keys that it sees: other queries of the block must not change its bits.
            if MASKED:
                seen = tl.max(tl.where(ok, scale[None, :], 0.0), 1)
            else:
                seen = tl.max(scale, 0)
            new_reference = tl.maximum(reference, seen)
            up = 1.0 / new_reference * HEADROOM
            p = p * scale[None, :] * up[:, None]
        else:
            new_reference = tl.maximum(reference, tl.max(scale, 0))
            p *= (scale * (HEADROOM / new_reference))[None, :]
        ratio = reference / new_reference
        if FIXED:  # dividing equal numbers need not give 1, and an unseen tile must give 1
            ratio = tl.where(new_reference > reference, ratio, 1.0)
        fade *= ratio
        reference = new_reference
    p = operand(p, V, FULL)
    if V.zero_point:
        zeros = zeros * fade + tl.sum(p.to(tl.float32) * zero[None, :], 1)
    elif V.bias > 0:
        zeros = zeros * fade + tl.sum(p.to(tl.float32), 1) * V.bias
    if V.per_block:
        block = _block_scales(v_scales, page, small, there, page_units, V, HEAD_V, PAD_V, PTX)
    parts = elements(v, block, V, FULL, PTX)
    f = fade[:, None]
    sums = ()
    for e in tl.static_range(len(parts)):
        sums = sums + (tl.dot(p, parts[e], acc[e] * f, input_precision="ieee"),)
    return sums, new_top, den, zeros, reference, next_page


@triton.jit
def _query_part(pointer, there, words, sign, normal,
                E: tl.constexpr, e: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr,
                HEAD: tl.constexpr):  # fmt: skip
    q = tl.load(pointer[:, None] + (E * words + e)[None, :],
                mask=there[:, None] & (E * words + e < HEAD)[None, :], other=0.0)  # fmt: skip
    q = q.to(tl.float32) * (sign * normal)[:, None]
    return operand(q, FORMAT, FULL)


@triton.jit
def clear(out, first, end, step, head, GROUP: tl.constexpr, HEADS: tl.constexpr,
           HEAD: tl.constexpr, PAD: tl.constexpr):  # fmt: skip
    """Writes zeros for one KV head's query heads of every `step`-th token."""
    c = tl.arange(0, PAD)
    for token in range(first, end, step):
        for i in range(GROUP):
            row = (tl.full((), 0, tl.int64) + token) * (HEADS * GROUP) + head * GROUP + i
            tl.store(out + row * HEAD + c, tl.zeros((PAD,), out.dtype.element_ty), mask=c < HEAD)


@triton.jit
def with_narrow(o, lse, narrow, narrow_lse, row, there, mask, c, HEAD_V: tl.constexpr):
    """Joins rows o [rows, columns] of wide keys with the rows of the other keys. lse: [rows], base 2.

    narrow: [.., HEAD_V] float32; narrow_lse: log-sum-exp of its rows; row: their indices [rows]. mask: of o.
    """
    other = tl.load(narrow_lse + row, mask=there, other=float("-inf"))
    part = tl.load(narrow + row[:, None] * HEAD_V + c[None, :], mask=mask, other=0.0)
    higher = tl.maximum(lse, other)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    a = tl.exp2(lse - base)
    b = tl.exp2(other - base)
    whole = a + b
    whole = tl.where(whole > 0, whole, 1.0 + 0.0 * whole)  # NaN stays NaN
    return (o * a[:, None] + part * b[:, None]) / whole[:, None]


@triton.jit
def sum_of_parts(
    partial, partial_lse, first, count, head, r, there, top, den,
    HEADS: tl.constexpr, HEAD_V: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, VALID: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Returns weighted sums [VALID, PAD] over items first .. first + count, with top [VALID] and den.

    top, den: base-2 maximum and sum of weights so far, for instance of sinks. r: rows of a block [VALID];
    there: which to read.
    """
    c = tl.arange(0, PAD)
    s = tl.arange(0, AT_ONCE)
    o = tl.zeros((VALID, PAD), tl.float32)
    for begin in range(0, count, AT_ONCE):
        slot = ((first + begin + s).to(tl.int64) * HEADS + head)[:, None] * ROWS + r[None, :]
        mask = (begin + s < count)[:, None] & there[None, :]
        lse = tl.load(partial_lse + slot, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(partial + slot[:, :, None] * HEAD_V + c[None, None, :],
                       mask=mask[:, :, None] & (c < HEAD_V)[None, None, :], other=0.0,
                       cache_modifier=".cg")  # fmt: skip
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(lse - base[None, :])
        fade = tl.exp2(top - base)
        o = o * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        den = den * fade + tl.sum(weight, 0)
        top = higher
    return o, top, den


@triton.jit
def _join(
    partial, partial_lse, sinks, out, narrow, narrow_lse, first, splits, first_token, num_queries, block,
    head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_V: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, VALID: tl.constexpr, AT_ONCE: tl.constexpr, SINKS: tl.constexpr,
    ROTATED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Joins the first VALID rows of a block from its items first .. first + splits, and writes them."""
    r = tl.arange(0, VALID)
    c = tl.arange(0, PAD)
    at_row = block * ROWS + r
    there = at_row // GROUP < num_queries
    query_head = head * GROUP + at_row % GROUP
    if SINKS:
        top = tl.load(sinks + query_head, mask=there, other=0.0).to(tl.float32) * LOG2E
        den = tl.full((VALID,), 1.0, tl.float32)
    else:
        top = tl.full((VALID,), float("-inf"), tl.float32)
        den = tl.zeros((VALID,), tl.float32)
    o, top, den = sum_of_parts(
        partial, partial_lse, first, splits, head, r, there, top, den,
        HEADS, HEAD_V, PAD, ROWS, VALID, AT_ONCE,
    )  # fmt: skip
    o = tl.where((den > 0)[:, None], o / den[:, None], (0.0 * den)[:, None])
    if ROTATED:
        ROTATION: tl.constexpr = HEAD_V & -HEAD_V
        o = hadamard(o, VALID, PAD, ROTATION) / ROTATION
    token = (first_token + at_row // GROUP).to(tl.int64)
    row = token * (HEADS * GROUP) + query_head
    mask = there[:, None] & (c < HEAD_V)[None, :]
    if FORM > 0:
        lse = tl.where(den > 0, top + tl.log2(den), top + den)
        if FORM == NARROW:
            tl.store(narrow_lse + row, lse, mask=there)
        else:
            o = with_narrow(o, lse, narrow, narrow_lse, row, there, mask, c, HEAD_V)
    tl.store(out + row[:, None] * HEAD_V + c[None, :], o.to(out.dtype.element_ty), mask=mask)


@triton.jit
def attend_item(
    q_ptr, q_stride_token, q_stride_head, k_codes, k_scales, v_codes, v_scales, shifts, page_units,
    k_outer, v_outer, sinks, page_table, max_pages, seq, first_token, num_queries, length, head, block,
    split, splits, per_split, softmax_scale, cap, window, sink, lag,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    K: tl.constexpr, HEAD_K: tl.constexpr, PAD_K: tl.constexpr,
    V: tl.constexpr, HEAD_V: tl.constexpr, PAD_V: tl.constexpr,
    K_OUTER: tl.constexpr, V_OUTER: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    FULL: tl.constexpr, DIRECT: tl.constexpr, FIXED: tl.constexpr, PTX: tl.constexpr, FORM: tl.constexpr,
    WAIT: tl.constexpr = False, STAGES: tl.constexpr = 1, MASKED: tl.constexpr = False,
):  # fmt: skip
    """Returns rows [ROWS, E * PAD_V] of one item, divided by their sums; log-sum-exp [ROWS] in base 2.

    Arguments: as in `paged_attention`. block: of the sequence's query rows; split: index among `splits`.
    Values that are stored rotated stay rotated. WAIT: reads page ids, then waits for the previous kernel.
    """
    ELEMENTS_K: tl.constexpr = K.elements
    ELEMENTS_V: tl.constexpr = V.elements
    FACTOR_K: tl.constexpr = K.factor
    FACTOR_V: tl.constexpr = V.factor
    EVEN_K: tl.constexpr = K.even
    EVEN_V: tl.constexpr = V.even
    r = block * ROWS + tl.arange(0, ROWS)
    query = r // GROUP
    there = query < num_queries
    query_head = head * GROUP + r % GROUP
    here = length - num_queries + query  # position of each row's query
    if CAUSAL:
        row_hi = here + 1
    elif WINDOW:
        row_hi = tl.minimum(length, here + window)
    else:
        row_hi = length + 0 * here
    row_hi = tl.where(there, row_hi, 0)
    row_lo = here - window + 1 if WINDOW else 0 * here
    if FORM == NARROW:
        row_hi = tl.where(there, tl.maximum(row_hi - lag, 0), 0)
        row_lo = sink + 0 * here
    last_query = tl.minimum((block * ROWS + ROWS - 1) // GROUP, num_queries - 1)
    first_query = block * ROWS // GROUP
    end = length
    start = 0
    visible = 0
    whole = length  # tiles up to here need no mask
    if CAUSAL:
        end = length - num_queries + last_query + 1
        whole = length - num_queries + first_query + 1
    if FORM == NARROW:
        end = tl.maximum(end - lag, 0)
        whole = tl.maximum(whole - lag, 0)
        visible = sink
        start = sink // TILE * TILE
    if WINDOW:
        visible = tl.maximum(length - num_queries + first_query - window + 1, 0)
        start = visible // TILE * TILE
        if not CAUSAL:
            end = tl.minimum(length, length - num_queries + last_query + window)
    if FIXED:
        first_key = split * per_split * TILE
        begin = tl.maximum(first_key, start)
        end = tl.minimum(end, first_key + per_split * TILE)
    else:
        first_key = tl.where(
            split == 0, 0, start
        )  # the first keys are wide: they belong to the first item
        step = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), splits), TILE) * TILE
        begin = start + split * step
        end = tl.minimum(end, begin + step)

    pages = page_table + seq.to(tl.int64) * max_pages
    # Tiles before the others: wide keys at the begin, and a tile that has some of them.
    before = 0 * begin
    before_from = begin
    if FORM == NARROW and not FIXED:
        before = (begin < sink).to(tl.int32)
    if FORM == WIDE:
        before_from = first_key
        before = tl.cdiv(tl.maximum(tl.minimum(tl.minimum(sink, start), end) - first_key, 0), TILE)
    open_from = begin
    if FORM == NARROW:
        open_from = begin + before * TILE
    first_page = page_ids(pages, open_from, end, TILE, PAGE)
    if WAIT:
        gdc_wait()

    # Loads the query: the largest magnitude of each row, then its parts.
    token = (first_token + query).to(tl.int64)
    q_row = q_ptr + token * q_stride_token + query_head * q_stride_head
    jk = tl.arange(0, PAD_K)
    sign = tl.where(softmax_scale < 0, -1.0, 1.0)
    if K.operand != tl.float16 or FULL:
        norm = tl.full((ROWS,), 1.0, tl.float32)
        inverse = norm
    else:
        norm = tl.zeros((ROWS,), tl.float32)
        for e in tl.static_range(ELEMENTS_K):
            c = ELEMENTS_K * jk + e
            raw = tl.load(q_row[:, None] + c[None, :],
                          mask=there[:, None] & (c < HEAD_K)[None, :], other=0.0)  # fmt: skip
            norm = tl.maximum(norm, tl.max(tl.abs(raw.to(tl.float32)), 1))
        norm = tl.maximum(norm, 1.0e-30)
        inverse = 1.0 / norm
    q = ()
    q_sum = tl.zeros((ROWS,), tl.float32)
    for e in tl.static_range(ELEMENTS_K):
        by = EVEN_K if e % 2 == 0 else 1.0
        part = _query_part(q_row, there, jk, sign * by, inverse, ELEMENTS_K, e, K, FULL, HEAD_K)
        q = q + (part,)
        q_sum += tl.sum(part.to(tl.float32), 1) / by
    q_sum = q_sum / FACTOR_K
    factor = norm * (tl.abs(softmax_scale) * FACTOR_K)
    if K_OUTER > 0:
        factor *= tl.load(k_outer + head * (K_OUTER - 1))
    if not SOFTCAP:
        factor *= LOG2E

    z = tl.zeros((ROWS, PAD_V), tl.float32)
    acc = ()
    for _ in tl.static_range(ELEMENTS_V):
        acc = acc + (z,)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    den = tl.zeros((ROWS,), tl.float32)
    zeros = tl.zeros((ROWS,), tl.float32)
    reference = SMALL
    if FIXED:
        reference = tl.full((ROWS,), SMALL, tl.float32)
    state = (acc, top, den, zeros, reference, first_page)
    masked_from = open_from
    # FIXED: which tiles need a mask depends on the other queries of the block, and two separately compiled
    # loops may round differently.
    if not WINDOW and not FIXED and not MASKED:
        masked_from = open_from + tl.maximum(tl.minimum(whole, end) - open_from, 0) // TILE * TILE
        for at in range(open_from, masked_from, TILE):
            state = _tile(
                state, q, q_sum, factor, cap, at, at + TILE, visible, end, row_lo, row_hi, sink,
                k_codes, k_scales, v_codes, v_scales, shifts, page_units, pages, head,
                TILE, HEADS, PAGE, K, HEAD_K, PAD_K, V, HEAD_V, PAD_V,
                False, SOFTCAP, FULL, FIXED, PTX, FORM,
            )  # fmt: skip
    if FORM == 0:
        # Behind a loop of tiles without a mask, one or two are left: copying ahead would only take registers.
        for at in tl.range(masked_from, end, TILE, num_stages=None if WINDOW or MASKED else 1):
            state = _tile(
                state, q, q_sum, factor, cap, at, at + TILE, visible, end, row_lo, row_hi, sink,
                k_codes, k_scales, v_codes, v_scales, shifts, page_units, pages, head,
                TILE, HEADS, PAGE, K, HEAD_K, PAD_K, V, HEAD_V, PAD_V,
                True, SOFTCAP, FULL, FIXED, PTX, FORM,
            )  # fmt: skip
    else:
        count = before + tl.cdiv(tl.maximum(end - masked_from, 0), TILE)
        at = tl.where(before > 0, before_from, masked_from)
        acc, top, den, zeros, reference, _ = state
        state = (acc, top, den, zeros, reference, page_ids(pages, at, end, TILE, PAGE))
        for i in tl.range(0, count, num_stages=STAGES):
            at = tl.where(i < before, before_from + i * TILE, masked_from + (i - before) * TILE)
            next_at = tl.where(
                i + 1 < before, before_from + (i + 1) * TILE, masked_from + (i + 1 - before) * TILE
            )
            state = _tile(
                state, q, q_sum, factor, cap, at, next_at, visible, end, row_lo, row_hi, sink,
                k_codes, k_scales, v_codes, v_scales, shifts, page_units, pages, head,
                TILE, HEADS, PAGE, K, HEAD_K, PAD_K, V, HEAD_V, PAD_V,
                True, SOFTCAP, FULL, FIXED, PTX, FORM,
            )  # fmt: skip
    acc, top, den, zeros, reference, _ = state
    if SOFTCAP:
        level = top * LOG2E
    else:
        level = top * factor

    direct = DIRECT and splits == 1
    if direct and SINKS:
        bias = tl.load(sinks + query_head, mask=there, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(level, bias)
        den = den * tl.exp2(level - higher) + tl.exp2(bias - higher)
        shrink = tl.exp2(level - higher)
        level = higher
    else:
        shrink = tl.full((ROWS,), 1.0, tl.float32)
    value = tl.where(den > 0, shrink / den, 0.0 * den)  # NaN stays NaN
    less = zeros * (-value)  # minima are added, without the factor of the largest scale
    if V.per_row:
        value *= reference / HEADROOM
    if V_OUTER > 0:
        value *= tl.load(v_outer + head * (V_OUTER - 1))
    if not V.minimum:
        less = zeros * value
    parts = ()
    for e in tl.static_range(ELEMENTS_V):
        part = acc[e] * (value * (FACTOR_V * (EVEN_V if e % 2 == 0 else 1.0)))[:, None]
        if ELEMENTS_V > 1:
            part -= less[:, None]
        parts = parts + (part,)
    o = in_order(parts, ROWS, PAD_V)
    lse = tl.where(den > 0, level + tl.log2(den), float("-inf"))
    return o, tl.where(den != den, den, lse)


# Numbers that change from step to step. Triton would compile a kernel for each class of number (1, multiples
# of 16, others), and requests would wait a second for each.
_VARYING = (
    "page_units", "max_pages", "num_seqs", "window", "target", "least", "num_tokens", "sink", "lag",
)  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def paged_attention(
    q_ptr, q_stride_token, q_stride_head, k_codes, k_scales, v_codes, v_scales, shifts, page_units,
    k_outer, v_outer, sinks,
    out, partial, partial_lse, narrow, narrow_lse,
    cu_seqlens_q, seqlens_kv, items, page_table, max_pages, num_seqs, arrived, num_tokens,
    softmax_scale, cap, window, target, least, sink, lag,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    K: tl.constexpr, HEAD_K: tl.constexpr, PAD_K: tl.constexpr,
    V: tl.constexpr, HEAD_V: tl.constexpr, PAD_V: tl.constexpr,
    K_OUTER: tl.constexpr, V_OUTER: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    FULL: tl.constexpr, DIRECT: tl.constexpr, FIXED: tl.constexpr, LISTED: tl.constexpr,
    PTX: tl.constexpr, JOIN: tl.constexpr, AT_ONCE: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, LANES: tl.constexpr, FORM: tl.constexpr = 0, MASKED: tl.constexpr = False,
):  # fmt: skip
    """Program item * HEADS + KV head: programs of one item run side by side and share memory pages.

    Writes `out` if DIRECT and the sequence is one item long, else partial results.

    K, V: `Format` of the pages. q: [T, HEADS * GROUP, HEAD_K] by its strides.
    out: [T, HEADS * GROUP, HEAD_V], rotated back if values are stored rotated.
    partial: [items, HEADS, ROWS, HEAD_V] float32, each row divided by its sum.
    partial_lse: [items, HEADS, ROWS] float32, base 2.
    shifts: see `load_24_bit_words`. page_units: distance of two pages, see `launch.page_units`.
    k_outer, v_outer: float32 scales outside the pages. K_OUTER, V_OUTER: 0 none, 1 for [1], 2 for [HEADS].
    FIXED: an item is `least` tiles counted from token 0, in any batch. LISTED: items is from `list_items`.
    JOIN: the last program of a row's items joins their partial results, AT_ONCE items at a time and in order;
    JOIN is the number of valid rows, rounded up to a power of two; 0 leaves them to `combine`.
    arrived: int32 [items, HEADS], zeros before and after the launch. AHEAD: starts while the previous kernel
    runs. EARLY: meanwhile reads the work map and page ids, which that kernel does not write.
    LANES: see `launch.lanes`. MASKED: tiles that need no mask get one, too, so that a single loop copies all
    of them ahead.
    FORM: 0, or the form of keys to read. NARROW reads keys from `sink` on without a query's latest `lag`
    keys; it writes float32 `out` and narrow_lse [T, HEADS * GROUP], in base 2. WIDE reads the first `sink`
    keys and a `window`, and joins the result with narrow, which has the shape of `out`, and narrow_lse.
    """
    if AHEAD:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    ELEMENTS_V: tl.constexpr = V.elements
    ROTATION: tl.constexpr = HEAD_V & -HEAD_V
    head = tl.program_id(0) % HEADS
    item = tl.program_id(0) // HEADS
    unused = num_tokens
    if JOIN > 0:
        unused = tl.load(cu_seqlens_q + num_seqs) + item  # tokens of no sequence get zeros
    per_split = least
    if LISTED:
        seq, first_item, splits = listed(items, item)
    else:
        if not FIXED:
            per_split = tiles_per_split(cu_seqlens_q, seqlens_kv, num_seqs, window, target, least,
                                        GROUP, ROWS, TILE, CAUSAL, WINDOW, True, LANES)  # fmt: skip
        seq, first_item, splits = find_item(item, per_split, cu_seqlens_q, seqlens_kv, num_seqs, window,
                                            GROUP, ROWS, TILE, CAUSAL, WINDOW and not FIXED,
                                            LANES)  # fmt: skip
    if seq < 0:
        if AHEAD and EARLY:
            gdc_wait()
        if JOIN > 0:
            clear(out, unused, num_tokens, tl.num_programs(0) // HEADS, head, GROUP, HEADS, HEAD_V,
                  ELEMENTS_V * PAD_V)  # fmt: skip
        return
    block = (item - first_item) // splits
    split = (item - first_item) % splits
    first_token = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - first_token
    length = tl.load(seqlens_kv + seq)

    o, lse = attend_item(
        q_ptr, q_stride_token, q_stride_head, k_codes, k_scales, v_codes, v_scales, shifts, page_units,
        k_outer, v_outer, sinks, page_table, max_pages, seq, first_token, num_queries, length, head, block,
        split, splits, per_split, softmax_scale, cap, window, sink, lag,
        GROUP, HEADS, PAGE, ROWS, TILE, K, HEAD_K, PAD_K, V, HEAD_V, PAD_V, K_OUTER, V_OUTER,
        CAUSAL, WINDOW, SOFTCAP, SINKS, FULL, DIRECT, FIXED, PTX, FORM, AHEAD and EARLY, MASKED=MASKED,
    )  # fmt: skip
    if JOIN > 0:
        clear(out, unused, num_tokens, tl.num_programs(0) // HEADS, head, GROUP, HEADS, HEAD_V,
              ELEMENTS_V * PAD_V)  # fmt: skip
    r = block * ROWS + tl.arange(0, ROWS)
    there = r // GROUP < num_queries
    c = tl.arange(0, ELEMENTS_V * PAD_V)
    mask = there[:, None] & (c < HEAD_V)[None, :]
    if DIRECT and splits == 1:
        row = (first_token + r // GROUP).to(tl.int64) * (HEADS * GROUP) + head * GROUP + r % GROUP
        if V.rotated:
            o = hadamard(o, ROWS, ELEMENTS_V * PAD_V, ROTATION) / ROTATION
        if FORM == NARROW:
            tl.store(narrow_lse + row, lse, mask=there)
        elif FORM == WIDE:
            o = with_narrow(o, lse, narrow, narrow_lse, row, there, mask, c, HEAD_V)
        tl.store(out + row[:, None] * HEAD_V + c[None, :], o.to(out.dtype.element_ty), mask=mask)
    else:
        slot = (item.to(tl.int64) * HEADS + head) * ROWS + tl.arange(0, ROWS)
        tl.store(partial + slot[:, None] * HEAD_V + c[None, :], o, mask=mask)
        tl.store(partial_lse + slot, lse, mask=there)
        if JOIN > 0:
            first = first_item + block * splits
            tl.debug_barrier()
            arrived_before = tl.atomic_add(arrived + first * HEADS + head, 1, sem="acq_rel")
            if arrived_before == splits - 1:
                _join(
                    partial, partial_lse, sinks, out, narrow, narrow_lse, first, splits, first_token,
                    num_queries, block, head, GROUP, HEADS, HEAD_V, ELEMENTS_V * PAD_V, ROWS, JOIN, AT_ONCE,
                    SINKS, V.rotated, FORM,
                )  # fmt: skip
                tl.store(arrived + first * HEADS + head, 0)
