"""Messages between rank 0 and another rank: strictly typed msgpack, and arrays of steps.

The sockets and the shared memory are inherited, so no other process has them. Ranks of torchrun connect over
TCP and prove that they know a secret (`kvant.parallel.launched`). A message from rank 0 begins with a 64-bit
word that tells arrays (`kvant.parallel.mirror`) from msgpack.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvant.kv.transfer.messages import Part
from kvant.models.sharding.shard import Shard
from kvant.parallel.mirror import NEXT, STEP, ZERO, SentAsk, Table
from kvant.plan.settings import Settings


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Tells a process to become one rank of an engine. fingerprint: `plan_fingerprint` of rank 0's plan.

    max_num_seqs: rows of the row table. gpu: the device's index, None on a CPU. meet: the argument of
    `kvant.parallel.group.open_store`. num_threads: torch's threads on a CPU.
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
    """The first message of a torchrun rank on each of its two connections. secret: read from the store."""

    secret: str
    rank: int
    is_pulse: bool
    pid: int


class Connect(msgspec.Struct, frozen=True, tag="connect", array_like=True):
    """Tells a rank to connect to the other ranks and make its pool."""


class Capture(msgspec.Struct, frozen=True, tag="capture", array_like=True):
    """Tells a rank to call `ModelRunner.capture` with these arguments."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_drafts: tuple[int, ...]


class CountSaturated(msgspec.Struct, frozen=True, tag="count", array_like=True):
    """Asks a rank for `Counted`."""


class Propose(msgspec.Struct, frozen=True, tag="propose", array_like=True):
    """Tells a rank to call `ModelRunner.propose`."""

    asks: Sequence[SentAsk]


class KeepPages(msgspec.Struct, frozen=True, tag="keep", array_like=True):
    """Tells a rank to make the plan's tiers and to answer `KeepsPages`.

    identity: of rank 0's pages; None if pages go neither to files nor to other engines.
    """

    identity: dict[str, str] | None


class StorePages(msgspec.Struct, frozen=True, tag="store", array_like=True):
    """Tells a rank to call `Mover.store`. moves: (group, device page, host page)."""

    job: int
    moves: Sequence[tuple[int, int, int]]


class LoadPages(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """Tells a rank to call `Mover.load`. moves: (group, device page, host page, all ranks' checksums)."""

    job: int
    moves: Sequence[tuple[int, int, int, bytes]]


class ReadFiles(msgspec.Struct, frozen=True, tag="read", array_like=True):
    """Tells a rank to call `Files.read`. reads: (group, hash, host page)."""

    reads: Sequence[tuple[int, bytes, int]]


class WriteFiles(msgspec.Struct, frozen=True, tag="write", array_like=True):
    """Tells a rank to call `Files.write`. writes: (group, hash, host page, all ranks' checksums)."""

    writes: Sequence[tuple[int, bytes, int, bytes]]


class TouchFiles(msgspec.Struct, frozen=True, tag="touch", array_like=True):
    """Tells a rank to call `Files.touch`. keys: (group, hash)."""

    keys: Sequence[tuple[int, bytes]]


class ForgetFiles(msgspec.Struct, frozen=True, tag="forget", array_like=True):
    """Tells a rank to call `Files.forget` for each (group, hash), or `Files.forget_own` if keys is empty."""

    keys: Sequence[tuple[int, bytes]]


class MeetPeer(msgspec.Struct, frozen=True, tag="meet", array_like=True):
    """Tells a rank where engine `number` of --kv-transfer has its parts. parts: of ranks 1 and up."""

    number: int
    parts: Sequence[Part]


class ReadPeer(msgspec.Struct, frozen=True, tag="take", array_like=True):
    """Tells a rank to read its parts of pages of the engine that `MeetPeer` told about.

    reads: (group, hash, host page here, host page there, checksum of all parts there).
    """

    number: int
    reads: Sequence[tuple[int, bytes, int, int, bytes]]


ToRank = (
    Connect | Capture | CountSaturated | Table | Propose | KeepPages | StorePages | LoadPages
    | ReadFiles | WriteFiles | TouchFiles | ForgetFiles | MeetPeer | ReadPeer
)  # fmt: skip


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Says that the rank's weights are on its device."""


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """Saturated values of one rank. saturated: (layer index, count of K, count of V) of layers with any."""

    saturated: tuple[tuple[int, int, int], ...]


class KeepsPages(msgspec.Struct, frozen=True, tag="keeps"):
    """Says that the rank's tiers are made. identity: of its part, None as in `KeepPages`.

    part: of pages that are exchanged with other engines, None if none are.
    """

    identity: dict[str, str] | None
    part: Part | None = None


class PagesMoved(msgspec.Struct, frozen=True, tag="moved"):
    """The result of `StorePages` or `LoadPages` for the rank's parts; see `Moved`."""

    job: int
    checksums: tuple[bytes | None, ...]
    num_bytes: int
    seconds: float
    fault: str = ""


class FilesDone(msgspec.Struct, frozen=True, tag="files"):
    """Finished reads and writes of the rank's parts. reads: (group, hash, checksum or None, seconds).
    writes: (group, hash, whether it was written). num_bad: parts with wrong contents so far.
    """

    reads: tuple[tuple[int, bytes, bytes | None, float], ...]
    writes: tuple[tuple[int, bytes, bool], ...]
    num_bad: int


class PeerRead(msgspec.Struct, frozen=True, tag="peer"):
    """The result of `ReadPeer`. reads and num_bad: as in `FilesDone`."""

    number: int
    reads: tuple[tuple[int, bytes, bytes | None, float], ...]
    num_bad: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Says that the rank ends. text: the reason."""

    text: str


Answer = Loaded | Counted | KeepsPages
FromRank = Answer | PagesMoved | FilesDone | PeerRead | Failed


def encode(message: Start | Hello | FromRank) -> bytes:
    return _ENCODER.encode(message)


def encode_to_rank(message: ToRank) -> bytes:
    return _MESSAGE + _ENCODER.encode(message)


def read_to_rank(data: bytes) -> ToRank | NDArray[np.int64]:
    """Decodes a message, or an array of a step or of pages to zero. Raises msgspec.ValidationError."""
    if int.from_bytes(data[:8], sys.byteorder) in (STEP, ZERO, NEXT):
        return np.frombuffer(bytearray(data), np.int64)
    return _TO_RANK.decode(memoryview(data)[8:])


def read_from_rank(data: bytes) -> FromRank:
    """Decodes a rank's message. Raises msgspec.ValidationError."""
    return _FROM_RANK.decode(data)


def read_start(data: bytes) -> Start:
    """Decodes the first message to a rank. Raises msgspec.ValidationError."""
    return msgspec.msgpack.decode(data, type=Start)


def read_hello(data: bytes) -> Hello:
    """Decodes the first message of a torchrun rank. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=Hello)


def _plain(value: object) -> int:
    """Converts numpy's integers, which msgspec does not encode."""
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"a {type(value).__name__} is not sent")


_MESSAGE = bytes(8)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
