"""A forward as a list of operations that compiled code runs without returning to Python."""

from __future__ import annotations

from numba import njit

from kvant.attention.cpu.layout import Call, Write
from kvant.kernels.cpu.vector import enter, fork, load_i64, run_at, store_i64
from kvant.models.cpu.layout import Kind, Operation, StepFields, Task

(
    S_TOKENS, S_CHOSEN, _, S_THREADS, _, S_NUM_SEQS, S_CU, S_LENGTHS, S_TABLE, S_TABLE_STRIDE,
    S_SLOTS, S_CAUSAL, S_WRITE, S_WRITE_WORKER, S_ATTEND, S_ATTEND_WORKER, _,
) = (int(f) for f in StepFields)  # fmt: skip
T_NEXT, T_TEAM, T_TICKET, T_WORKER, T_ROWS = (int(f) for f in Task)
O_KIND, O_TASK, O_ALONE, O_SIZE = (int(f) for f in Operation)
K_LAST, K_WRITE, K_ATTEND = int(Kind.LAST_TASK), int(Kind.WRITE), int(Kind.ATTEND)
W_SLOTS, W_TOKENS, W_OTHER = int(Write.SLOTS), int(Write.TOKENS), int(Write.OTHER)
C_NUM_SEQS, C_TOKENS, C_CU, C_LENGTHS, C_TABLE, C_TABLE_STRIDE, C_CAUSAL = (
    int(f) for f in (
        Call.NUM_SEQS, Call.TOKENS, Call.CU_SEQLENS_Q, Call.SEQLENS_KV, Call.PAGE_TABLE,
        Call.PAGE_TABLE_STRIDE, Call.CAUSAL,
    )
)  # fmt: skip


@njit(error_model="numpy")
def operate(step: int, operations: int, first: int, end: int, parallel: int, team: int) -> None:
    """Run operations first .. end - 1 in order, each on a number of threads that suits its size.

    parallel: address of what runs a function on several threads, 0 for this one alone. team: theirs.
    """
    threads, tokens = load_i64(step + S_THREADS), load_i64(step + S_TOKENS)
    for i in range(first, end):
        kind = load_i64(operations + i * O_SIZE + O_KIND)
        task = load_i64(operations + i * O_SIZE + O_TASK)
        store_i64(task + T_TEAM, team)
        if kind == K_WRITE:
            for side in (task, load_i64(task + W_OTHER)):
                store_i64(side + W_SLOTS, load_i64(step + S_SLOTS))
                store_i64(side + W_TOKENS, tokens)
            enter(
                load_i64(step + S_WRITE), task, load_i64(step + S_WRITE_WORKER), parallel, threads
            )
        elif kind == K_ATTEND:
            store_i64(task + C_NUM_SEQS, load_i64(step + S_NUM_SEQS))
            store_i64(task + C_TOKENS, tokens)
            store_i64(task + C_CU, load_i64(step + S_CU))
            store_i64(task + C_LENGTHS, load_i64(step + S_LENGTHS))
            store_i64(task + C_TABLE, load_i64(step + S_TABLE))
            store_i64(task + C_TABLE_STRIDE, load_i64(step + S_TABLE_STRIDE))
            store_i64(task + C_CAUSAL, load_i64(step + S_CAUSAL))
            enter(
                load_i64(step + S_ATTEND), task, load_i64(step + S_ATTEND_WORKER), parallel, threads
            )
        else:
            rows = load_i64(step + S_CHOSEN) if kind == K_LAST else tokens
            store_i64(task + T_NEXT, 0)
            store_i64(task + T_TICKET, 0)
            store_i64(task + T_ROWS, rows)
            worker = load_i64(task + T_WORKER)
            alone = rows <= load_i64(operations + i * O_SIZE + O_ALONE)
            if alone or parallel == 0:
                run_at(worker, task, 0)
            else:
                fork(parallel, worker, task, threads)
