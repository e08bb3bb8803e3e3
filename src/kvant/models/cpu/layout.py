"""Blocks of fields: the arguments of the operations of one forward."""

from __future__ import annotations

from enum import IntEnum, auto

from kvant.kernels.cpu.fields import LINE, Fields, plain

HEAD = range(0, 40, 8)
"""Every task begins with these fields: NEXT (dealt out while running), TEAM (the block of these threads, in
the same place in tasks of attention), TICKET, WORKER (void(task, _), which all threads run until nothing
is left) and ROWS.
"""


@plain
class Task(Fields):
    """What all tasks have."""

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD


@plain
class Product(Fields):
    """out[ROWS, OUTPUTS] = x[ROWS, COLUMNS] . weight + bias. With a narrow weight x is rounded, see `Round`.

    With one, STRIDE is that of tiles of 16 outputs, and SCALES and BIAS have whole tiles.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    WEIGHT = auto()
    STRIDE = auto()
    SCALES = auto()  # of outputs, 0 without
    BIAS = auto()
    OUTPUTS = auto()
    COLUMNS = auto()
    CHUNK = auto()  # outputs, or tiles of them, that a thread takes at a time
    X = auto()
    X_STRIDE = auto()
    OUT = auto()
    OUT_STRIDE = auto()
    END = auto()


@plain
class Round(Fields):
    """out[ROWS] = x[ROWS, COLUMNS] as integers, see `kvant.models.cpu.rounding`."""

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    X = auto()
    X_STRIDE = auto()
    OUT = auto()
    OUT_STRIDE = auto()
    COLUMNS = auto()
    END = auto()


@plain
class Embed(Fields):
    """out[ROWS, COLUMNS] = rows IDS of a narrow weight, decoded."""

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    IDS = auto()
    WEIGHT = auto()
    STRIDE = auto()
    COLUMNS = auto()
    OUT = auto()
    OUT_STRIDE = auto()
    END = auto()


@plain
class Norm(Fields):
    """out = norm of x, or of x + residual; row i of x and residual is INDEX[i], or i without."""

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    X = auto()
    RESIDUAL = auto()
    WEIGHT = auto()
    OUT = auto()
    INDEX = auto()  # int64, or 0
    WIDTH = auto()
    EPS = auto()
    END = auto()


@plain
class Rotate(Fields):
    """q and k of qkv [ROWS, (Q_HEADS + 2 KV_HEADS) * HEAD_DIM] normed by head, and rotated, in place."""

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    QKV = auto()
    Q_HEADS = auto()
    KV_HEADS = auto()
    HEAD_DIM = auto()
    COS = auto()  # [ROWS, HEAD_DIM / 2]
    SIN = auto()
    Q_NORM = auto()  # 0 without
    K_NORM = auto()
    EPS = auto()
    END = auto()


@plain
class Gate(Fields):
    """out[ROWS, WIDTH] = silu(gate) * up, of gate_up [ROWS, 2 * WIDTH]."""

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    GATE_UP = auto()
    OUT = auto()
    WIDTH = auto()
    END = auto()


@plain
class StepFields(Fields):
    """Arguments that all operations of one forward share."""

    TOKENS = auto()
    CHOSEN = auto()  # rows whose logits are asked
    PARALLEL = auto()  # GOMP_parallel, or 0
    THREADS = auto()
    TEAM = auto()
    NUM_SEQS = auto()
    CU_SEQLENS_Q = auto()
    SEQLENS_KV = auto()
    PAGE_TABLE = auto()
    PAGE_TABLE_STRIDE = auto()
    SLOTS = auto()
    CAUSAL = auto()
    WRITE = auto()  # entries and workers of attention
    WRITE_WORKER = auto()
    ATTEND = auto()
    ATTEND_WORKER = auto()
    END = auto()


@plain
class Team(Fields):
    """Threads that run one forward together; fields that are waited for have cache lines of their own."""

    JOBS = auto()  # given out so far
    DONE = LINE  # jobs that others than the leader have done
    TICKET = 2 * LINE  # the first thread to come leads
    FUNCTION = auto()  # the job: void(data, _); 0 to end
    DATA = auto()
    OTHERS = auto()  # threads beside the leader
    COUNT_THREADS = auto()  # omp_get_num_threads
    YIELD = auto()  # sched_yield
    SHARE = auto()  # the entry of `team.share`
    STEP = auto()
    OPERATIONS = auto()
    FIRST = auto()
    LAST = auto()
    TAKE_PART = auto()  # the function of the region
    END = auto()


@plain
class Kind(IntEnum):
    """Kind of an operation of a program."""

    TASK = 0
    LAST_TASK = 1  # of the chosen rows alone
    WRITE = 2
    ATTEND = 3


@plain
class Operation(Fields):
    """One operation. ALONE: rows up to which one thread does it, since waking others costs more."""

    KIND = auto()
    TASK = auto()
    ALONE = auto()
    END = auto()
