"""What travels between rank 0 and another rank: msgpack, strictly typed, and arrays of steps.

The sockets and the memory are inherited; only these processes have them. Ranks of torchrun come over TCP
and prove that they know a secret (`kvant.parallel.launched`). What rank 0 sends begins with a
word that tells arrays (`kvant.parallel.mirror`) from msgpack.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvant.models.sharding.shard import Shard
from kvant.parallel.mirror import STEP, ZERO, SentAsk, Table
from kvant.plan.settings import Settings


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Become one rank of an engine. fingerprint: `plan_fingerprint` of rank 0's plan.

    max_num_seqs: rows of the row table. gpu: the device's index, None on a CPU. meet: where ranks
    meet, see `kvant.parallel.group.open_store`. num_threads: torch's on a CPU.
    """

    settings: Settings
    shard: Shard
    fingerprint: str
    num_pages: int
    max_num_seqs: int
    gpu: int | None
    meet: str
    num_threads: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What a rank of torchrun says first on each of its two connections. secret: rank 0's, from the store."""

    secret: str
    rank: int
    is_pulse: bool
    pid: int


class Connect(msgspec.Struct, frozen=True, tag="connect", array_like=True):
    """Meet the other ranks and make the pool."""


class Capture(msgspec.Struct, frozen=True, tag="capture", array_like=True):
    """`ModelRunner.capture`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_drafts: tuple[int, ...]


class CountSaturated(msgspec.Struct, frozen=True, tag="count", array_like=True):
    """Answer with `Counted`."""


class Propose(msgspec.Struct, frozen=True, tag="propose", array_like=True):
    """`ModelRunner.propose`."""

    asks: Sequence[SentAsk]


class KeepPages(msgspec.Struct, frozen=True, tag="keep", array_like=True):
    """Make the tiers of the plan; answer with `KeepsPages`. identity: of rank 0's files, None without any."""

    identity: dict[str, str] | None


class StorePages(msgspec.Struct, frozen=True, tag="store", array_like=True):
    """`Mover.store`. moves: (group, device page, host page)."""

    job: int
    moves: Sequence[tuple[int, int, int]]


class LoadPages(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """`Mover.load`. moves: (group, device page, host page, checksums of all ranks' parts)."""

    job: int
    moves: Sequence[tuple[int, int, int, bytes]]


class ReadFiles(msgspec.Struct, frozen=True, tag="read", array_like=True):
    """`Files.read`. reads: (group, hash, host page)."""

    reads: Sequence[tuple[int, bytes, int]]


class WriteFiles(msgspec.Struct, frozen=True, tag="write", array_like=True):
    """`Files.write`. writes: (group, hash, host page, checksums of all ranks' parts)."""

    writes: Sequence[tuple[int, bytes, int, bytes]]


class TouchFiles(msgspec.Struct, frozen=True, tag="touch", array_like=True):
    """`Files.touch`. keys: (group, hash)."""

    keys: Sequence[tuple[int, bytes]]


class ForgetFiles(msgspec.Struct, frozen=True, tag="forget", array_like=True):
    """`Files.forget` for each of these, or `Files.forget_own` without any. keys: (group, hash)."""

    keys: Sequence[tuple[int, bytes]]


ToRank = (
    Connect | Capture | CountSaturated | Table | Propose | KeepPages | StorePages | LoadPages
    | ReadFiles | WriteFiles | TouchFiles | ForgetFiles
)  # fmt: skip


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The rank's weights are on its device."""


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """saturated: (layer index, values of K, values of V) of layers that could not hold some."""

    saturated: tuple[tuple[int, int, int], ...]


class KeepsPages(msgspec.Struct, frozen=True, tag="keeps"):
    """The rank's tiers are made. identity: of its files, None without any."""

    identity: dict[str, str] | None


class PagesMoved(msgspec.Struct, frozen=True, tag="moved"):
    """`Moved` of the rank's part of each page."""

    job: int
    checksums: tuple[bytes | None, ...]
    num_bytes: int
    seconds: float


class FilesDone(msgspec.Struct, frozen=True, tag="files"):
    """What became of parts of pages. reads: (group, hash, checksum or None, seconds). writes: (group, hash,
    whether it was written). num_bad: parts so far that were not what they should be.
    """

    reads: tuple[tuple[int, bytes, bytes | None, float], ...]
    writes: tuple[tuple[int, bytes, bool], ...]
    num_bad: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank ends. text: why."""

    text: str


Answer = Loaded | Counted | KeepsPages
FromRank = Answer | PagesMoved | FilesDone | Failed


SUM_BYTES = 16
"""Size of the checksum of a rank's part of a page, see `kvant.kv.offload.page_files`."""


def part_of(checksums: bytes, rank: int) -> bytes:
    """Returns the checksum of a rank's part. checksums: of all ranks, one behind the other."""
    return checksums[SUM_BYTES * rank : SUM_BYTES * (rank + 1)]


def encode(message: Start | Hello | FromRank) -> bytes:
    return _ENCODER.encode(message)


def encode_to_rank(message: ToRank) -> bytes:
    return _MESSAGE + _ENCODER.encode(message)


def read_to_rank(data: bytes) -> ToRank | NDArray[np.int64]:
    """A message, or the array of a step or of pages to zero. Raises msgspec.ValidationError."""
    if int.from_bytes(data[:8], sys.byteorder) in (STEP, ZERO):
        return np.frombuffer(bytearray(data), np.int64)
    return _TO_RANK.decode(memoryview(data)[8:])


def read_from_rank(data: bytes) -> FromRank:
    """Raises msgspec.ValidationError."""
    return _FROM_RANK.decode(data)


def read_start(data: bytes) -> Start:
    """Raises msgspec.ValidationError."""
    return msgspec.msgpack.decode(data, type=Start)


def read_hello(data: bytes) -> Hello:
    """Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=Hello)


def _plain(value: object) -> int:
    """Numbers of numpy among lists."""
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"a {type(value).__name__} is not sent")


_MESSAGE = bytes(8)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
