"""A forward as a list of operations that compiled code runs without returning to Python."""

from __future__ import annotations

from numba import njit

from kvant.attention.cpu.layout import Call, Write
from kvant.kernels.cpu.vector import enter, fork, load_i64, run_at, store_i64
from kvant.models.cpu.layout import Kind, Operation, StepFields, Task


@njit(error_model="numpy")
def operate(step: int, operations: int, first: int, end: int, parallel: int, team: int) -> None:
    """Runs operations first .. end - 1 in order. Small operations run on one thread.

    parallel: address of a function that runs another on several threads; 0 to use this thread only. team: the
    threads' team, for it.
    """
    threads, tokens = load_i64(step + StepFields.THREADS), load_i64(step + StepFields.TOKENS)
    for i in range(first, end):
        kind = load_i64(operations + i * Operation.END + Operation.KIND)
        task = load_i64(operations + i * Operation.END + Operation.TASK)
        store_i64(task + Task.TEAM, team)
        if kind == Kind.WRITE:
            for side in (task, load_i64(task + Write.OTHER)):
                store_i64(side + Write.SLOTS, load_i64(step + StepFields.SLOTS))
                store_i64(side + Write.TOKENS, tokens)
            enter(
                load_i64(step + StepFields.WRITE),
                task,
                load_i64(step + StepFields.WRITE_WORKER),
                parallel,
                threads,
            )
        elif kind == Kind.ATTEND:
            store_i64(task + Call.NUM_SEQS, load_i64(step + StepFields.NUM_SEQS))
            store_i64(task + Call.TOKENS, tokens)
            store_i64(task + Call.CU_SEQLENS_Q, load_i64(step + StepFields.CU_SEQLENS_Q))
            store_i64(task + Call.SEQLENS_KV, load_i64(step + StepFields.SEQLENS_KV))
            store_i64(task + Call.PAGE_TABLE, load_i64(step + StepFields.PAGE_TABLE))
            store_i64(task + Call.PAGE_TABLE_STRIDE, load_i64(step + StepFields.PAGE_TABLE_STRIDE))
            store_i64(task + Call.CAUSAL, load_i64(step + StepFields.CAUSAL))
            enter(
                load_i64(step + StepFields.ATTEND),
                task,
                load_i64(step + StepFields.ATTEND_WORKER),
                parallel,
                threads,
            )
        else:
            rows = load_i64(step + StepFields.CHOSEN) if kind == Kind.LAST_TASK else tokens
            store_i64(task + Task.NEXT, 0)
            store_i64(task + Task.TICKET, 0)
            store_i64(task + Task.ROWS, rows)
            worker = load_i64(task + Task.WORKER)
            alone = rows <= load_i64(operations + i * Operation.END + Operation.ALONE)
            if alone or parallel == 0:
                run_at(worker, task, 0)
            else:
                fork(parallel, worker, task, threads)
