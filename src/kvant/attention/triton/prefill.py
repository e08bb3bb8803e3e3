"""Long runs of queries: a kernel decodes keys and values once, then cuDNN computes attention.

With hundreds of queries per sequence, products cost more than memory traffic. cuDNN's attention reaches
600 TFLOP/s on an H200; the paged kernel reaches 360. cuDNN reads the stored keys and values, decoded to the
queries' dtype.

cuDNN takes 27 ms to plan a new shape, and supports causal attention only if queries and keys start at the
same token. So a query run is split into few shapes: a causal square at the end, padded at its end (no query
sees the padding), and blocks of keys before it that every query sees. The parts are joined by their
log-sum-exp. Sequences that begin in this step and fill squares of one size are
multiplied together, a power of two at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import triton
from torch import Tensor

from kvant.attention.base import AttentionParams, LongQuery, Step
from kvant.attention.launching import outer
from kvant.attention.need import LONG, LONG_STRIDE
from kvant.attention.triton.format import format_of
from kvant.attention.triton.gather import gather_rows
from kvant.attention.triton.info import INFO
from kvant.attention.triton.launch import page_units, shifts, words
from kvant.attention.triton.prefill_rows import join_rows, pack_rows, unpack_rows
from kvant.kernels.triton.device import has_ptx
from kvant.kv.geometry import LayerGeometry
from kvant.kv.pool import KVPool, LayerCache

_BLOCKS = tuple(LONG_STRIDE << i for i in reversed(range(8)))
"""Sizes of key blocks before the square; the remaining keys go into the square."""

_MOST_TOGETHER = 32
"""Maximum number of sequences in one call of cuDNN."""


def serves(cache: LayerCache, q: Tensor, params: AttentionParams, *, causal: bool) -> bool:
    """Whether cuDNN serves this layer. Only the dtype and device of q [T, num_q_heads, head_dim] matter."""
    plain = params.window is None and not params.softcap and params.sinks is None
    return causal and plain and _serves(cache.spec.geometry, q.dtype, q.device)


def _serves(g: LayerGeometry, dtype: torch.dtype, device: torch.device) -> bool:
    return (
        dtype in (torch.float16, torch.bfloat16)
        and g.head_dim_k == g.head_dim_v
        and g.head_dim_k in (64, 96, 128)
        and g.window is None
        and not g.softcap
        and not g.sinks
        and has_ptx(device)
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    )


def square_size(num_tokens: int) -> int:
    """Rounds `num_tokens` up to the size of a square; there are few sizes."""
    step = 256 if num_tokens <= 2048 else 1024
    return -(-num_tokens // step) * step


def _fewest(size: int) -> int:
    """Returns the tokens of the shortest long query run that has a square of this size."""
    return max(LONG, size - (256 if size <= 2048 else 1024) + 1)


def sizes(max_num_tokens: int, max_length: int) -> Iterator[tuple[int, int, int, bool]]:
    """Yields (sequences, queries, keys, causal) of every product for steps of up to max_num_tokens."""
    squares = {square_size(n) for n in range(LONG, max_num_tokens + _BLOCKS[-1] + 1, 256)}
    for size in sorted(squares):
        yield 1, size, size, True
        if size <= square_size(max_num_tokens):
            yield from ((1, size, block, False) for block in _BLOCKS if block <= max_length)
        together = 2
        while together <= _MOST_TOGETHER and together * _fewest(size) <= max_num_tokens:
            yield together, size, size, True
            together *= 2


def prepare(pool: KVPool, dtype: torch.dtype, max_num_tokens: int, max_length: int) -> None:
    """Plans every shape in cuDNN, and compiles the joining kernel for every pair of dtypes, at start.

    A request would otherwise wait 27 ms for each new shape. Layers of other backends are skipped.
    """
    shapes = {
        (g.num_q_heads, g.num_kv_heads, g.head_dim_k)
        for g in (spec.geometry for spec in pool.plan.layers if spec.backend == INFO.name)
        if g.has_kv and _serves(g, dtype, pool.device)
    }
    for q_heads, kv_heads, head_dim in shapes:
        for count, queries, keys, causal in sizes(max_num_tokens, max_length):
            q = torch.zeros(count, queries, q_heads, head_dim, dtype=dtype, device=pool.device)
            k = torch.zeros(count, keys, kv_heads, head_dim, dtype=dtype, device=pool.device)
            _product(q, k, k, 1.0, causal=causal)
        part, lse = q[0, :1], q.new_zeros(q_heads, 1, dtype=torch.float32)
        for before, after in itertools.product((dtype, torch.float32), repeat=2):
            join(part.to(before), lse, part, lse, torch.empty_like(part, dtype=after))


def attend_long(
    cache: LayerCache, q: Tensor, out: Tensor, step: Step, params: AttentionParams
) -> None:
    """Attends causally to the queries of `step.long`; other rows of `out` keep their values.

    q, out: [T, num_q_heads, head_dim] in one 16-bit dtype.
    """
    q = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
    for some in _together(step.long):
        if len(some) > 1:
            _attend_new(cache, q, out, step, params, some)
        else:
            _attend_one(cache, q, out, step, params, some[0])


def _together(long: Sequence[LongQuery]) -> Iterator[Sequence[LongQuery]]:
    """Groups neighbours of the same square size, a power of two of them.

    Sequences with a prefix stay alone.
    """
    start = 0
    while start < len(long):
        size = square_size(long[start].num_tokens)
        end = start
        while end < len(long) and long[end].is_new and square_size(long[end].num_tokens) == size:
            end += 1
        count = min(_MOST_TOGETHER, 1 << max(0, (end - start).bit_length() - 1))
        yield long[start : start + count]
        start += count


def _attend_new(
    cache: LayerCache,
    q: Tensor,
    out: Tensor,
    step: Step,
    params: AttentionParams,
    some: Sequence[LongQuery],
) -> None:
    """Attends for neighbouring sequences without stored tokens, each a square of the same size."""
    size, first = square_size(some[0].num_tokens), some[0]
    k = decoded(cache, 0, step, first, size, q.dtype, len(some))
    v = decoded(cache, 1, step, first, size, q.dtype, len(some))
    full = all(one.num_tokens == size for one in some)
    rows = slice(first.first_token, first.first_token + len(some) * size)
    if full and q.is_contiguous():
        squares = q[rows].view(len(some), size, *q.shape[1:])
    else:
        squares = _packed(q, step, first, size, 0, len(some))
    found, _ = _product(squares, k, v, params.scale, causal=True)
    if full:
        out[rows].view(found.shape).copy_(found)
        return
    width = q.shape[1] * q.shape[2]
    unpack_rows[(size, len(some))](
        found.contiguous(), out, step.cu_seqlens_q, first.sequence, size,
        WIDTH=width, PAD=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def _attend_one(
    cache: LayerCache,
    q: Tensor,
    out: Tensor,
    step: Step,
    params: AttentionParams,
    long: LongQuery,
) -> None:
    """Attends for one sequence, with any number of stored tokens before this step."""
    prefix = long.length - long.num_tokens
    spare = prefix % _BLOCKS[-1]
    before = prefix - spare
    size = square_size(spare + long.num_tokens)
    k = decoded(cache, 0, step, long, before + size, q.dtype)
    v = decoded(cache, 1, step, long, before + size, q.dtype)
    n = long.num_tokens
    rows = slice(long.first_token, long.first_token + n)
    # The square's first `spare` queries are padding: they align the others.
    whole = not spare and size == n and q.is_contiguous()
    square = q[rows][None] if whole else _packed(q, step, long, size, spare)
    squared, squared_lse = _product(
        square,
        _cut(k, slice(before, None)),
        _cut(v, slice(before, None)),
        params.scale,
        causal=True,
    )
    found, lse = squared[0], squared_lse[0]
    mine = slice(spare, spare + n)
    if not before:
        out[rows] = found[mine]
        return
    queries = _packed(q, step, long, square_size(n), 0) if spare else square
    total, total_lse = found[mine], lse[:, mine]
    blocks = list(_blocks(before))
    for place, keys in enumerate(blocks):
        part, part_lse = _product(queries, _cut(k, keys), _cut(v, keys), params.scale, causal=False)
        last = place + 1 == len(blocks)
        target = out[rows] if last else torch.empty_like(out[rows], dtype=torch.float32)
        total_lse = join(total, total_lse, part[0], part_lse[0], target)
        total = target


def _packed(
    q: Tensor, step: Step, first: LongQuery, size: int, spare: int, count: int = 1
) -> Tensor:
    """Returns queries of `count` sequences, each after `spare` zeros: [count, size, heads, head_dim]."""
    squares = torch.empty(count, size, *q.shape[1:], dtype=q.dtype, device=q.device)
    width = q.shape[1] * q.shape[2]
    pack_rows[(size, count)](
        q, q.stride(0), squares, step.cu_seqlens_q, first.sequence, size, spare,
        WIDTH=width, PAD=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return squares


def decoded(
    cache: LayerCache,
    side: int,
    step: Step,
    first: LongQuery,
    tokens: int,
    dtype: torch.dtype,
    count: int = 1,
    skipped: int = 0,
) -> Tensor:
    """Decodes stored keys (side 0) or values (side 1) of `count` sequences from `first` on.

    Returns [count, tokens, num_kv_heads, head_dim] in dtype, from token `skipped` on, with zeros past each
    end.
    """
    g = cache.spec.geometry
    choice, planes, scale, head = (
        (cache.spec.k, cache.k, cache.k_scale, g.head_dim_k)
        if side == 0
        else (cache.spec.v, cache.v, cache.v_scale, g.head_dim_v)
    )
    assert choice is not None
    format = format_of(choice.dtype)
    out = torch.empty(count, tokens, g.num_kv_heads, head, dtype=dtype, device=planes[0].device)
    tile = 32
    gather_rows[(triton.cdiv(tokens, tile), g.num_kv_heads, count)](
        *words(planes, format), shifts(planes[0].device, format), page_units(cache), scale,
        step.page_table, step.page_table.stride(0), step.seqlens_kv, first.sequence, skipped, out,
        tokens,
        HEADS=g.num_kv_heads, HEAD=head, PAGE=cache.page_size, TILE=tile,
        FORMAT=format, PAD=triton.next_power_of_2(head // format.elements), OUTER=outer(scale),
        PTX=has_ptx(out.device), num_warps=4,
    )  # fmt: skip
    return out


def _cut(x: Tensor, rows: slice) -> Tensor:
    """Returns rows of the one sequence in x, as a batch of one with the strides that cuDNN planned for."""
    return x[0, rows][None]


def _blocks(count: int) -> Iterator[slice]:
    """Yields slices that cover `count` keys, the longest first."""
    start = 0
    for size in _BLOCKS:
        while count - start >= size:
            yield slice(start, start + size)
            start += size


def _product(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attends with q [b, n, num_q_heads, d] over k and v [b, m, num_kv_heads, d].

    Returns [b, n, num_q_heads, d] and its log-sum-exp [b, num_q_heads, n].
    """
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        True,
        0.0,
        causal,
        False,
        scale=scale,
    )
    return found[0].transpose(1, 2), found[1][..., 0]


def join(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor, out: Tensor) -> Tensor:
    """Joins a and b [n, heads, d] into out by their lse [heads, n]; returns the joined lse.

    b may be longer.
    """
    n, heads, d = out.shape
    lse = torch.empty(heads, n, dtype=torch.float32, device=out.device)
    at_once = 8
    join_rows[(n, triton.cdiv(heads, at_once))](
        a, a.stride(0), a_lse, a_lse.stride(0), b, b.stride(0), b_lse, b_lse.stride(0),
        out, lse, heads, D=d, PAD=triton.next_power_of_2(d), AT_ONCE=at_once, num_warps=2,
    )  # fmt: skip
    return lse
