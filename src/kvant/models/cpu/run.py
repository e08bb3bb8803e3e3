"""The entry that Python calls: operations of a forward, alone or in a team of threads."""

from __future__ import annotations

from kvant.kernels.cpu.block import Block, address, block_of
from kvant.kernels.cpu.compiled import Entry, compiled_entry
from kvant.kernels.cpu.threads import openmp_address, parallel_address
from kvant.kernels.cpu.vector import fork, load_i64, store_i64
from kvant.models.cpu.layout import StepFields, Team
from kvant.models.cpu.program import operate
from kvant.models.cpu.team import share_address, take_part_address, yield_address

S_PARALLEL, S_THREADS, S_TEAM = (
    int(f) for f in (StepFields.PARALLEL, StepFields.THREADS, StepFields.TEAM)
)
M_JOBS, M_DONE, M_TICKET, M_STEP, M_OPERATIONS, M_FIRST, M_LAST, M_TAKE_PART = (
    int(f) for f in (
        Team.JOBS, Team.DONE, Team.TICKET, Team.STEP, Team.OPERATIONS, Team.FIRST, Team.LAST,
        Team.TAKE_PART,
    )
)  # fmt: skip


def _run(step: int, operations: int, first: int, end: int) -> int:
    """Operations first .. end - 1; end."""
    parallel, threads = load_i64(step + S_PARALLEL), load_i64(step + S_THREADS)
    team = load_i64(step + S_TEAM)
    if threads == 1 or parallel == 0:
        operate(step, operations, first, end, 0, 0)
        return end
    store_i64(team + M_JOBS, 0)
    store_i64(team + M_DONE, 0)
    store_i64(team + M_TICKET, 0)
    store_i64(team + M_STEP, step)
    store_i64(team + M_OPERATIONS, operations)
    store_i64(team + M_FIRST, first)
    store_i64(team + M_LAST, end)
    fork(parallel, load_i64(team + M_TAKE_PART), team, threads)
    return end


def run_function() -> Entry:
    """`_run`, compiled."""
    return compiled_entry(_run)


def new_step() -> tuple[Block, Block]:
    """The block of a step, and that of the team it names."""
    step, team = block_of(StepFields), block_of(Team)
    team[Team.COUNT_THREADS // 8] = openmp_address("omp_get_num_threads")
    team[Team.YIELD // 8] = yield_address()
    team[Team.SHARE // 8], team[Team.TAKE_PART // 8] = share_address(), take_part_address()
    step[StepFields.PARALLEL // 8] = parallel_address()
    step[StepFields.TEAM // 8] = address(team)
    return step, team
