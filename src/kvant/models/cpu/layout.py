"""Defines blocks of fields, which are the arguments of a forward's operations."""

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
    """Fields that every task of the compiled forward has."""

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD


@plain
class Product(Fields):
    """out[ROWS, OUTPUTS] = x[ROWS, COLUMNS] . weight + bias.

    With a narrow weight, x is rounded (`Round`), STRIDE is that of tiles of 16 outputs, and SCALES and BIAS
    are padded to whole tiles. With numbers, a
    result is rounded to bfloat16 if ROUNDS is not 0. Each thread has SCRATCH_STRIDE bytes of SCRATCH for
    CHUNK rows of a bfloat16 weight in float32; 0 without.
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
    ROUNDS = auto()
    SCRATCH = auto()
    SCRATCH_STRIDE = auto()
    END = auto()


@plain
class ExpertProduct(Fields):
    """out[i] = x[i] . weight of the expert to which row i belongs; weight [experts, OUTPUTS, COLUMNS].

    An expert's rows are STARTS[expert] .. STARTS[expert + 1] of out, and of x; with INDEX, of INDEX, which
    has their places in x. ACTIVE: how many experts have rows, and which. The rest as in `Product`.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    WEIGHT = auto()
    EXPERT_STRIDE = auto()
    STRIDE = auto()
    BIAS = auto()  # zeros
    OUTPUTS = auto()
    COLUMNS = auto()
    CHUNK = auto()
    X = auto()
    X_STRIDE = auto()
    INDEX = auto()
    STARTS = auto()
    ACTIVE = auto()
    OUT = auto()
    OUT_STRIDE = auto()
    ROUNDS = auto()
    SCRATCH = auto()
    SCRATCH_STRIDE = auto()
    END = auto()


@plain
class Route(Fields):
    """IDS [ROWS, TOP_K] int64 and WEIGHTS [ROWS, TOP_K] of experts with the largest LOGITS [ROWS, EXPERTS].

    WEIGHTS are a softmax's of all logits, of the chosen ones with RENORMALISE. ROUNDS: to bfloat16.
    SCRATCH: EXPERTS float32 for each thread.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    LOGITS = auto()
    EXPERTS = auto()
    TOP_K = auto()
    RENORMALISE = auto()
    ROUNDS = auto()
    IDS = auto()
    WEIGHTS = auto()
    SCRATCH = auto()
    END = auto()


@plain
class Sort(Fields):
    """Pairs of a token and one of its TOP_K experts by expert, all int64.

    Row TOKENS[i] belongs to pair i in this order. PLACES [ROWS, TOP_K]: where a pair stands in it.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    IDS = auto()
    EXPERTS = auto()
    TOP_K = auto()
    STARTS = auto()  # [EXPERTS + 1]
    ACTIVE = auto()  # [EXPERTS + 1]
    TOKENS = auto()
    PLACES = auto()
    END = auto()


@plain
class Combine(Fields):
    """out[ROWS, WIDTH] = the sum of WEIGHTS times the rows PLACES of RESULTS.

    SHARED [ROWS, WIDTH] is added, 0 without; times the sigmoid of x . GATE, if GATE is not 0. ROUNDS: sums
    are rounded to bfloat16. ROUNDS_TERMS: so is each term.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    RESULTS = auto()
    PLACES = auto()
    WEIGHTS = auto()
    TOP_K = auto()
    WIDTH = auto()
    OUT = auto()
    SHARED = auto()
    GATE = auto()
    X = auto()
    ROUNDS = auto()
    ROUNDS_TERMS = auto()
    END = auto()


@plain
class Round(Fields):
    """out[ROWS] = x[ROWS, COLUMNS] as integers, see `kvant.models.cpu.rounding`.

    ORDER: int32 [COLUMNS], the column of x for each column of out; 0 if they are the same.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    X = auto()
    X_STRIDE = auto()
    OUT = auto()
    OUT_STRIDE = auto()
    COLUMNS = auto()
    ORDER = auto()
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
    """out = norm of x, or of x + residual; row i of x and residual is INDEX[i], or i without.

    ROUNDS: sums and results are rounded to bfloat16. ROUNDS_FIRST: so is what WEIGHT multiplies.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    X = auto()
    RESIDUAL = auto()
    WEIGHT = auto()
    OUT = auto()
    INDEX = auto()  # int64, or 0
    WIDTH = auto()
    EPS = auto()
    ROUNDS = auto()
    ROUNDS_FIRST = auto()
    END = auto()


@plain
class Rotate(Fields):
    """q and k of qkv [ROWS, ..] normed by head, and rotated, in place. STRIDE: bytes of a row of qkv.

    Heads of q are Q_STRIDE bytes apart, and those of k follow behind. ROUNDS, ROUNDS_FIRST: as in `Norm`.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    QKV = auto()
    STRIDE = auto()
    Q_HEADS = auto()
    Q_STRIDE = auto()
    KV_HEADS = auto()
    HEAD_DIM = auto()
    HALF = auto()  # pairs of a head that are rotated
    COS = auto()  # [ROWS, HALF]
    SIN = auto()
    Q_NORM = auto()  # 0 without
    K_NORM = auto()
    EPS = auto()
    ROUNDS = auto()
    ROUNDS_FIRST = auto()
    END = auto()


@plain
class Gate(Fields):
    """out[i] = silu(gate) * up, of row i of gate_up [.., 2 * WIDTH], for ROWS * TIMES rows."""

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    GATE_UP = auto()
    OUT = auto()
    WIDTH = auto()
    TIMES = auto()
    ROUNDS = auto()
    END = auto()


@plain
class GateHeads(Fields):
    """x[ROWS, HEADS * HEAD_DIM] times the sigmoid of GATES, in place; rounded to bfloat16 with ROUNDS.

    GATES: those of the first row, 0 for none; STRIDE bytes to the next row's, HEAD_STRIDE to the next head's.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    X = auto()
    GATES = auto()
    STRIDE = auto()
    HEADS = auto()
    HEAD_STRIDE = auto()
    HEAD_DIM = auto()
    ROUNDS = auto()
    END = auto()


@plain
class Convolve(Fields):
    """out[ROWS, CHANNELS] = silu of a causal convolution of the newest inputs x and each sequence's state.

    A row is one sequence's only token. STATE: [pages, TAPS - 1, CHANNELS] with the earlier inputs, float32
    or, with IS_16, bfloat16. A sequence whose START is not positive begins with zeros.
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    X = auto()
    X_STRIDE = auto()
    OUT = auto()
    CHANNELS = auto()
    TAPS = auto()
    WEIGHT = auto()  # float32 [TAPS, CHANNELS], the newest input's last
    STATE = auto()
    PAGE_STRIDE = auto()
    IS_16 = auto()
    PAGES = auto()  # int64
    STARTS = auto()  # int32
    ROUNDS = auto()
    END = auto()


@plain
class Delta(Fields):
    """One token of the gated delta rule for each row, and the gated norm of its result.

    MIXED: [ROWS, ..] queries and keys of KEY_HEADS, values of HEADS. Z, B, A: the gates of the result, of
    what is written and of what decays, in rows STRIDE bytes apart. STATE: float32, [pages, HEADS, VALUES,
    KEYS].
    """

    NEXT, TEAM, TICKET, WORKER, ROWS = HEAD
    MIXED = auto()
    KEY_HEADS = auto()
    HEADS = auto()
    KEYS = auto()
    VALUES = auto()
    STRIDE = auto()
    Z = auto()
    B = auto()
    A = auto()
    DECAY = auto()  # float32 [HEADS], minus e^A_log
    BIAS = auto()  # float32 [HEADS]
    STRONGEST = auto()
    STATE = auto()
    PAGE_STRIDE = auto()
    PAGES = auto()
    STARTS = auto()
    NORM = auto()  # float32 [VALUES]
    EPS = auto()
    OUT = auto()  # [ROWS, HEADS * VALUES]
    SCRATCH = auto()
    SCRATCH_STRIDE = auto()
    ROUNDS = auto()
    END = auto()


@plain
class StepFields(Fields):
    """Arguments that all operations of one forward share."""

    TOKENS = auto()
    CHOSEN = auto()  # rows whose logits are needed
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
    """Threads that run one forward together. Fields on which threads wait have separate cache lines."""

    JOBS = auto()  # number of jobs announced so far
    DONE = LINE  # jobs done by threads other than the leader
    TICKET = 2 * LINE  # the first thread that takes one becomes the leader
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
    LAST_TASK = 1  # of the chosen rows only
    WRITE = 2
    ATTEND = 3


@plain
class Operation(Fields):
    """One operation. ALONE: most rows that one thread processes, since waking others would cost more."""

    KIND = auto()
    TASK = auto()
    ALONE = auto()
    END = auto()
