"""Blocks of fields: arguments that kernels pass to each other."""

from __future__ import annotations

from enum import IntEnum, auto

from kvant.kernels.cpu.fields import LINE, Fields, plain


@plain
class Tile(Fields):
    """One tile of keys or values of one KV head, for kernels of `decode`. Addresses, and sizes in bytes."""

    BASE = auto()  # first row of this KV head
    SLOTS = auto()  # int64 [2 * TILE], where rows begin, from BASE: this tile's and the next one's
    ROW_WORDS = auto()  # words of a row
    HEAD_DIM = auto()
    ROWS = auto()  # of queries
    IN = auto()  # keys: q [rows][head_dim]; values: weights [rows][TILE]
    IN_PITCH = auto()
    OUT = auto()  # keys: scores [rows][TILE]; values: sums [rows][..]
    OUT_PITCH = auto()
    WORDS = auto()  # scratch: [row words][TILE]
    EXPANDED = auto()  # scratch: float32 keys [head_dim][TILE] or values [TILE][head_dim]
    BLOCK_SCALES = auto()  # keys [blocks][TILE], values [TILE][blocks]
    NANS = auto()  # int32 [TILE], not 0 where an e4m3 key has NaN
    END = auto()


@plain
class Scaling(IntEnum):
    """Where a row's scale and offset are: number = scale * code + offset."""

    NONE = 0
    ROW = 1  # float32 scale
    ROW_ZERO_POINT = 2  # float32 scale with a zero point in its low 4 bits
    BLOCK = 3  # e4m3 per 16 numbers
    ROW_HALF = 4  # float16 scale
    ROW_HALF_OFFSET = 5  # float16 scale and offset
    ROW_SHORT = 6  # a scale of 12 bits above a zero point of 4: see `kvant.kv.codecs.int4_short`


@plain
class Real(IntEnum):
    """Types of queries and outputs."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2


@plain
class Call(Fields):
    """One call of `attend`. Addresses, counts, and float32 values as their bits."""

    # changed while running, each on a separate cache line
    NEXT = auto()
    TEAM = auto()  # of threads, if this runs inside one: see `kvant.models.cpu.team`
    TICKET = LINE
    # the step
    NUM_SEQS = 2 * LINE
    TOKENS = auto()
    CU_SEQLENS_Q = auto()
    SEQLENS_KV = auto()
    PAGE_TABLE = auto()
    PAGE_TABLE_STRIDE = auto()
    CAUSAL = auto()
    Q = auto()
    Q_TOKEN_STRIDE = auto()
    Q_HEAD_STRIDE = auto()
    Q_REAL = auto()
    OUT = auto()
    OUT_REAL = auto()
    SCALE = auto()
    SOFTCAP = auto()
    WINDOW = auto()
    SINKS = auto()
    # the keys to read; if rows have two forms, one call reads each form
    FLOOR = auto()  # the first key
    CEILING = auto()  # the end of keys, 0 for none
    LAG = auto()  # number of a query's latest keys to leave out
    STATE = auto()  # float32 [tokens, query heads, 2]: largest score, sum of weights; or 0
    FOLD = auto()  # whether to join the result with the one in OUT and STATE
    # the layer
    PAGE_SIZE = auto()
    PAGE_STRIDE = auto()  # bytes from a page to the next one
    KV_HEADS = auto()
    GROUP = auto()
    K_HEAD_DIM = auto()
    V_HEAD_DIM = auto()
    K_CODES = auto()
    K_ROW_BYTES = auto()
    K_SCALES = auto()
    K_SCALING = auto()
    K_OUTER = auto()  # float32 [K_OUTERS], or 0
    K_OUTERS = auto()
    K_FACTOR = auto()
    K_ROTATED = auto()
    K_KERNEL = auto()
    V_CODES = auto()
    V_ROW_BYTES = auto()
    V_SCALES = auto()
    V_SCALING = auto()
    V_OUTER = auto()
    V_OUTERS = auto()
    V_FACTOR = auto()
    V_ROTATED = auto()
    V_KERNEL = auto()
    V_HALVES = auto()  # whether the value kernel gives even numbers before odd ones
    E4M3 = auto()  # float32 [256]
    # the items of work, which `attend` makes
    SCRATCH = auto()
    SCRATCH_STRIDE = auto()
    PARTS = auto()
    COUNTERS = auto()
    ITEMS = auto()
    NUM_ITEMS = auto()
    END = auto()


@plain
class Write(Fields):
    """Rows of K or of V to write. Addresses, counts, and strides in bytes."""

    NEXT = auto()  # next token, advanced while running
    TEAM = auto()  # as in Call
    TICKET = auto()
    X = auto()
    TOKEN_STRIDE = auto()
    HEAD_STRIDE = auto()
    REAL = auto()
    HEADS = auto()
    HEAD_DIM = auto()
    PAGE_SIZE = auto()
    PAGE_STRIDE = auto()  # as in Call
    SLOTS = auto()  # int64 [tokens], -1 writes nowhere
    TOKENS = auto()
    CODES = auto()
    ROW_BYTES = auto()
    SCALES = auto()  # 0 if the format has none in its pages
    SCALE_BYTES = auto()  # of a row
    OUTER = auto()  # float32 [OUTERS], or 0
    OUTERS = auto()
    E4M3 = auto()  # float32 [256]
    KERNEL = auto()
    SCRATCH = auto()
    SCRATCH_STRIDE = auto()
    OTHER = auto()  # in the task of K, the task of V; else 0
    END = auto()


@plain
class Row(Fields):
    """One row, for a kernel that writes it."""

    X = auto()  # in its own dtype
    REAL = auto()
    HEAD_DIM = auto()
    NUMBERS = auto()  # in float32; the kernel may change it
    CODES = auto()
    SCALES = auto()
    OUTER = auto()  # float32 bits of a scale, or the address of a matrix
    E4M3 = auto()
    END = auto()


@plain
class Item(Fields):
    """One piece of work: some KV heads, some queries of one sequence, some splits of its keys."""

    SEQ = auto()
    FIRST_QUERY = auto()
    END_QUERY = auto()
    FIRST_HEAD = auto()
    END_HEAD = auto()
    FIRST_SPLIT = auto()
    END_SPLIT = auto()
    ALL_FIRST = auto()  # the splits of all items of these queries
    ALL_END = auto()
    PART = auto()  # first part of this group, in rows of PARTS
    COUNTER = auto()  # finished items of this group
    END = auto()
