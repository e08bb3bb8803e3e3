"""The entry that Python calls: runs operations of a forward, on one thread or in a team."""

from __future__ import annotations

from kvant.kernels.cpu.block import Block, address, block_of
from kvant.kernels.cpu.compiled import Entry, compiled_entry
from kvant.kernels.cpu.threads import openmp_address, parallel_address
from kvant.kernels.cpu.vector import fork, load_i64, store_i64
from kvant.models.cpu.layout import StepFields, Team
from kvant.models.cpu.program import operate
from kvant.models.cpu.team import share_address, take_part_address, yield_address


def _run(step: int, operations: int, first: int, end: int) -> int:
    """Runs operations first .. end - 1; returns end."""
    parallel, threads = load_i64(step + StepFields.PARALLEL), load_i64(step + StepFields.THREADS)
    team = load_i64(step + StepFields.TEAM)
    if threads == 1 or parallel == 0:
        operate(step, operations, first, end, 0, 0)
        return end
    store_i64(team + Team.JOBS, 0)
    store_i64(team + Team.DONE, 0)
    store_i64(team + Team.TICKET, 0)
    store_i64(team + Team.STEP, step)
    store_i64(team + Team.OPERATIONS, operations)
    store_i64(team + Team.FIRST, first)
    store_i64(team + Team.LAST, end)
    fork(parallel, load_i64(team + Team.TAKE_PART), team, threads)
    return end


def run_function() -> Entry:
    """Returns `_run`, compiled."""
    return compiled_entry(_run)


def new_step() -> tuple[Block, Block]:
    """Returns the block of a step, and the block of the team that it refers to."""
    step, team = block_of(StepFields), block_of(Team)
    team[Team.COUNT_THREADS // 8] = openmp_address("omp_get_num_threads")
    team[Team.YIELD // 8] = yield_address()
    team[Team.SHARE // 8], team[Team.TAKE_PART // 8] = share_address(), take_part_address()
    step[StepFields.PARALLEL // 8] = parallel_address()
    step[StepFields.TEAM // 8] = address(team)
    return step, team
