"""Measures how fast this machine reads memory, which limits every decode step."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from kvant.kernels.cpu.compiled import WORKER, kept_on_disk
from kvant.kernels.cpu.threads import parallel_address
from kvant.kernels.cpu.vector import (
    I32,
    I64,
    LANES,
    WORDS,
    fetch_add,
    fork,
    i64,
    load,
    load_i64,
    prefetch,
    run_at,
    store_i64,
    words,
)  # fmt: skip

_CHUNK = 1 << 18
_ACCUMULATORS = 8
_AHEAD = 8192  # bytes


@intrinsic
def _read(typing: Any, address: Any, blocks: Any) -> Any:
    """Reads one chunk, contiguous or as `blocks` runs of 512 bytes."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        address, blocks = arguments
        found = [cgutils.alloca_once(b, WORDS) for _ in range(_ACCUMULATORS)]
        for place in found:
            b.store(words(0), place)
        with cgutils.for_range(b, blocks) as loop:
            here = b.add(address, b.mul(loop.index, i64(4 * LANES * _ACCUMULATORS)))
            for i, place in enumerate(found):
                prefetch(b, b.add(here, i64(_AHEAD + 4 * LANES * i)))
                x = load(b, WORDS, b.add(here, i64(4 * LANES * i)), 4)
                b.store(b.or_(b.load(place), x), place)
        total = b.load(found[0])
        for place in found[1:]:
            total = b.or_(total, b.load(place))
        return b.sext(b.extract_element(total, ir.Constant(I32, 0)), I64)

    return types.int64(types.int64, types.int64), generate


def _work(task: int, _: int) -> None:
    """Reads chunks. task: next chunk, address, number of chunks, an address for the result."""
    address, chunks = load_i64(task + 8), load_i64(task + 16)
    while True:
        i = fetch_add(task, 1)
        if i >= chunks:
            return
        store_i64(task + 24, _read(address + i * _CHUNK, _CHUNK // (4 * LANES * _ACCUMULATORS)))


def _run(task: int, worker: int, parallel: int, threads: int) -> int:
    if threads == 1 or parallel == 0:
        run_at(worker, task, 0)
        return 1
    fork(parallel, worker, task, threads)
    return threads


@cache
def _functions() -> tuple[Any, Any]:
    with kept_on_disk() as is_kept:
        worker = cfunc(WORKER, cache=is_kept, error_model="numpy")(_work)
        run = njit("int64(int64, int64, int64, int64)", cache=is_kept, nogil=True)(_run)
    return worker, run


def read_everything(x: Tensor) -> None:
    """Reads a contiguous tensor once, in chunks distributed to torch's threads."""
    worker, run = _functions()
    task = torch.tensor([0, x.data_ptr(), x.numel() * x.element_size() // _CHUNK, 0])
    run(task.data_ptr(), worker.address, parallel_address(), torch.get_num_threads())
