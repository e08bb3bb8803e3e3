"""Threads that stay together for a whole forward.

OpenMP's threads meet at the end of every parallel region and sleep between regions. A forward would
have 150 regions, so one region holds the whole forward. The first thread leads: it runs the operations
and shares large ones. The others wait for jobs. They spin for a moment and then yield, because a waiting
thread may occupy the core of the thread that it waits for.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kvant.kernels.cpu.compiled import compiled_worker
from kvant.kernels.cpu.vector import I64, call, fetch_add, load_i64, run_at, store_i64
from kvant.models.cpu.layout import Task, Team
from kvant.models.cpu.program import operate

_SPINS = 2000


@intrinsic
def _load_acquire(typing: Any, address: Any) -> Any:
    """Loads an int64 that another thread adds to, and all that thread's earlier writes (acquire)."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        place = b.inttoptr(arguments[0], ir.PointerType())
        return b.load_atomic(place, "acquire", 8, typ=I64)

    return types.int64(types.int64), generate


@intrinsic
def _pause(typing: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _ask(typing: Any, function: Any) -> Any:
    """Calls a C function int() by its address."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return b.sext(b.call(b.inttoptr(arguments[0], kind.as_pointer()), []), I64)

    return types.int64(types.int64), generate


@njit(error_model="numpy")
def _wait(address: int, value: int, give_way: int) -> None:
    """Waits until the number at `address` is at least `value`."""
    spins = 0
    while _load_acquire(address) < value:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _ask(give_way)


@njit(error_model="numpy")
def _announce(team: int, function: int, data: int) -> int:
    """Announces a job; returns the number of jobs so far."""
    store_i64(team + Team.FUNCTION, function)
    store_i64(team + Team.DATA, data)
    return fetch_add(team + Team.JOBS, 1) + 1


def _share(function: int, data: int, threads: int, flags: int) -> None:
    """Replaces GOMP_parallel: runs function(data) on every thread of the team in data."""
    team = load_i64(data + Task.TEAM)
    jobs = _announce(team, function, data)
    run_at(function, data, 0)
    _wait(team + Team.DONE, jobs * load_i64(team + Team.OTHERS), load_i64(team + Team.YIELD))


def _take_part(team: int, _: int) -> None:
    """Runs on every thread of the region: the first leads, the others wait for jobs."""
    give_way = load_i64(team + Team.YIELD)
    if fetch_add(team + Team.TICKET, 1) == 0:
        store_i64(team + Team.OTHERS, _ask(load_i64(team + Team.COUNT_THREADS)) - 1)
        operate(
            load_i64(team + Team.STEP), load_i64(team + Team.OPERATIONS), load_i64(team + Team.FIRST),
            load_i64(team + Team.LAST), load_i64(team + Team.SHARE), team,
        )  # fmt: skip
        _announce(team, 0, 0)
        return
    seen = 0
    while True:
        seen += 1
        _wait(team + Team.JOBS, seen, give_way)
        function = load_i64(team + Team.FUNCTION)
        if function == 0:
            return
        run_at(function, load_i64(team + Team.DATA), 0)
        fetch_add(team + Team.DONE, 1)


@cache
def share_address() -> int:
    signature = types.void(types.int64, types.int64, types.int32, types.int32)
    return compiled_worker(_share, signature)


def take_part_address() -> int:
    return compiled_worker(_take_part)


@cache
def yield_address() -> int:
    """Returns the address of the C library's sched_yield."""
    found = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    assert found
    return found
