"""Write the rows of one step to their slots: K and V in one call, distributed to threads."""

from __future__ import annotations

from numba import njit

from kvant.attention.cpu.layout import Real, Row, Write
from kvant.kernels.cpu.compiled import Entry, compiled_entry, compiled_worker
from kvant.kernels.cpu.vector import (
    bits_of,
    fetch_add,
    fork,
    load_bf16,
    load_f16,
    load_f32,
    load_i64,
    run_at,
    store_f32,
    store_i64,
)  # fmt: skip

AT_ONCE = 8
"""Tokens per unit of work."""
WORTH_A_THREAD = 64
"""Tokens below which a second thread costs more than it saves."""
(
    W_NEXT, _, W_TICKET, W_X, W_TOKEN, W_HEAD, W_REAL, W_HEADS, W_DIM, W_PAGE, W_STRIDE, W_SLOTS, W_TOKENS,
    W_CODES, W_ROW_BYTES, W_SCALES, W_SCALE_BYTES, W_OUTER, W_OUTERS, W_E4M3, W_KERNEL, W_SCRATCH,
    W_SCRATCH_STRIDE, W_OTHER, _,
) = (int(f) for f in Write)  # fmt: skip
R_X, R_REAL, R_DIM, R_NUMBERS, R_CODES, R_SCALES, R_OUTER, R_E4M3, R_SIZE = (int(f) for f in Row)
_FLOAT16, _BFLOAT16 = int(Real.FLOAT16), int(Real.BFLOAT16)
_NO_SCALE = 0x3F800000  # 1.0


def scratch_bytes(head_dim: int) -> int:
    """Scratch bytes per thread: a row, and twice as much for kernels."""
    return int(Row.END) + 12 * head_dim + 64


@njit(error_model="numpy")
def _widen(start: int, real: int, n: int, to: int) -> None:
    if real == _FLOAT16:
        for i in range(n):
            store_f32(to + 4 * i, load_f16(start + 2 * i))
    elif real == _BFLOAT16:
        for i in range(n):
            store_f32(to + 4 * i, load_bf16(start + 2 * i))
    else:
        for i in range(n):
            store_f32(to + 4 * i, load_f32(start + 4 * i))


@njit(error_model="numpy")
def _token(task: int, token: int, row: int) -> None:
    """Write the rows of one token."""
    slot = load_i64(load_i64(task + W_SLOTS) + 8 * token)
    if slot < 0:
        return
    heads, n, real = load_i64(task + W_HEADS), load_i64(task + W_DIM), load_i64(task + W_REAL)
    numbers = row + R_SIZE
    store_i64(row + R_REAL, real)
    store_i64(row + R_DIM, n)
    store_i64(row + R_NUMBERS, numbers)
    store_i64(row + R_E4M3, load_i64(task + W_E4M3))
    outer = load_i64(task + W_OUTER)
    page_size = load_i64(task + W_PAGE)
    page = slot // page_size * load_i64(task + W_STRIDE)
    within = slot % page_size * heads
    for head in range(heads):
        x = load_i64(task + W_X) + token * load_i64(task + W_TOKEN) + head * load_i64(task + W_HEAD)
        _widen(x, real, n, numbers)
        place = within + head
        store_i64(row + R_X, x)
        store_i64(
            row + R_CODES, load_i64(task + W_CODES) + page + place * load_i64(task + W_ROW_BYTES)
        )
        scales = load_i64(task + W_SCALES) + page + place * load_i64(task + W_SCALE_BYTES)
        store_i64(row + R_SCALES, scales)
        outers = load_i64(task + W_OUTERS)
        if outers < 0:  # matrices, of which the kernel gets the address of one head's
            store_i64(row + R_OUTER, outer - 4 * head * outers if outer else 0)
        elif outer:
            store_i64(row + R_OUTER, bits_of(load_f32(outer + 4 * (head if outers > 1 else 0))))
        else:
            store_i64(row + R_OUTER, _NO_SCALE)
        run_at(load_i64(task + W_KERNEL), row, 0)


def _work(task: int, _: int) -> None:
    """Run on every thread: take tokens until none is left."""
    ticket = fetch_add(task + W_TICKET, 1)
    row = load_i64(task + W_SCRATCH) + ticket * load_i64(task + W_SCRATCH_STRIDE)
    tokens, other = load_i64(task + W_TOKENS), load_i64(task + W_OTHER)
    while True:
        first = fetch_add(task + W_NEXT, AT_ONCE)
        if first >= tokens:
            return
        for token in range(first, min(tokens, first + AT_ONCE)):
            _token(task, token, row)
            _token(other, token, row)


def _write(task: int, worker: int, parallel: int, threads: int) -> int:
    """Write K (task) and V (its OTHER); return the number of threads used."""
    store_i64(task + W_NEXT, 0)
    store_i64(task + W_TICKET, 0)
    if threads == 1 or parallel == 0 or load_i64(task + W_TOKENS) < WORTH_A_THREAD:
        run_at(worker, task, 0)
        return 1
    fork(parallel, worker, task, threads)
    return threads


def worker_address() -> int:
    """The compiled function that every thread runs."""
    return compiled_worker(_work)


def write_function() -> Entry:
    """`_write`, compiled."""
    return compiled_entry(_write)
