"""Writes the rows of one step to their slots: K and V in one call, distributed to threads."""

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
_NO_SCALE = 0x3F800000  # 1.0


def scratch_bytes(head_dim: int) -> int:
    """Returns scratch bytes per thread: for a row, and twice as much for kernels."""
    return int(Row.END) + 12 * head_dim + 64


@njit(error_model="numpy")
def _widen(start: int, real: int, n: int, to: int) -> None:
    if real == Real.FLOAT16:
        for i in range(n):
            store_f32(to + 4 * i, load_f16(start + 2 * i))
    elif real == Real.BFLOAT16:
        for i in range(n):
            store_f32(to + 4 * i, load_bf16(start + 2 * i))
    else:
        for i in range(n):
            store_f32(to + 4 * i, load_f32(start + 4 * i))


@njit(error_model="numpy")
def _token(task: int, token: int, row: int) -> None:
    """Writes the rows of one token."""
    slot = load_i64(load_i64(task + Write.SLOTS) + 8 * token)
    if slot < 0:
        return
    heads, n, real = (
        load_i64(task + Write.HEADS),
        load_i64(task + Write.HEAD_DIM),
        load_i64(task + Write.REAL),
    )
    numbers = row + Row.END
    store_i64(row + Row.REAL, real)
    store_i64(row + Row.HEAD_DIM, n)
    store_i64(row + Row.NUMBERS, numbers)
    store_i64(row + Row.E4M3, load_i64(task + Write.E4M3))
    outer = load_i64(task + Write.OUTER)
    page_size = load_i64(task + Write.PAGE_SIZE)
    page = slot // page_size * load_i64(task + Write.PAGE_STRIDE)
    within = slot % page_size * heads
    for head in range(heads):
        x = (
            load_i64(task + Write.X)
            + token * load_i64(task + Write.TOKEN_STRIDE)
            + head * load_i64(task + Write.HEAD_STRIDE)
        )
        _widen(x, real, n, numbers)
        place = within + head
        store_i64(row + Row.X, x)
        store_i64(
            row + Row.CODES,
            load_i64(task + Write.CODES) + page + place * load_i64(task + Write.ROW_BYTES),
        )
        scales = load_i64(task + Write.SCALES) + page + place * load_i64(task + Write.SCALE_BYTES)
        store_i64(row + Row.SCALES, scales)
        outers = load_i64(task + Write.OUTERS)
        if outers < 0:  # matrices: the kernel gets the address of the head's matrix
            store_i64(row + Row.OUTER, outer - 4 * head * outers if outer else 0)
        elif outer:
            store_i64(row + Row.OUTER, bits_of(load_f32(outer + 4 * (head if outers > 1 else 0))))
        else:
            store_i64(row + Row.OUTER, _NO_SCALE)
        run_at(load_i64(task + Write.KERNEL), row, 0)


def _work(task: int, _: int) -> None:
    """Runs on every thread: takes tokens until none is left."""
    ticket = fetch_add(task + Write.TICKET, 1)
    row = load_i64(task + Write.SCRATCH) + ticket * load_i64(task + Write.SCRATCH_STRIDE)
    tokens, other = load_i64(task + Write.TOKENS), load_i64(task + Write.OTHER)
    while True:
        first = fetch_add(task + Write.NEXT, AT_ONCE)
        if first >= tokens:
            return
        for token in range(first, min(tokens, first + AT_ONCE)):
            _token(task, token, row)
            _token(other, token, row)


def _write(task: int, worker: int, parallel: int, threads: int) -> int:
    """Writes K (task) and V (its OTHER); returns the number of threads used."""
    store_i64(task + Write.NEXT, 0)
    store_i64(task + Write.TICKET, 0)
    if threads == 1 or parallel == 0 or load_i64(task + Write.TOKENS) < WORTH_A_THREAD:
        run_at(worker, task, 0)
        return 1
    fork(parallel, worker, task, threads)
    return threads


def worker_address() -> int:
    """Returns the address of the compiled function that every thread runs."""
    return compiled_worker(_work)


def write_function() -> Entry:
    """Returns `_write`, compiled."""
    return compiled_entry(_write)
