"""What two engines tell each other before pages move: identities first, addresses only if they agree.

A taker asks over ZeroMQ, a giver answers; one message each, in MessagePack. Contents of pages never pass
here: the taker reads them from the giver's memory over NIXL.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

VERSION = 1
"""Version of these messages; engines of another version exchange nothing."""

MOST_KEYS = 8192
"""Pages of one question."""


class SideRows(msgspec.Struct, array_like=True):
    """How one side of a layer lies in a page: a name of a format, the first byte of each plane.

    scale: the values outside of the pages, None for a format without.
    """

    format: str
    offsets: list[int]
    scale: list[float] | None


class LayerRows(msgspec.Struct, array_like=True):
    """A layer in a page. v: None for latents."""

    index: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    k: SideRows
    v: SideRows | None


class GroupRows(msgspec.Struct, array_like=True):
    """Pages of one group: the window of its layers, bytes of a page, bytes from a page to the next."""

    window: int | None
    num_bytes: int
    stride: int
    layers: list[LayerRows]


def formats_of(groups: Iterable[GroupRows]) -> set[str]:
    """Names of all formats in pages."""
    sides = [side for group in groups for layer in group.layers for side in (layer.k, layer.v)]
    return {side.format for side in sides if side is not None}


class Part(msgspec.Struct, array_like=True):
    """One rank's part of every page. identity: `PageIdentity.fields`. agent: NIXL's metadata of the rank.

    first: address of its first page. groups: how pages lie there.
    """

    identity: dict[str, str]
    agent: bytes
    first: int
    groups: list[GroupRows]


class _Identities(msgspec.Struct):
    """identity: `PageIdentity.fields` of rank 0's part. others: identities of ranks 1 and up."""

    version: int
    identity: dict[str, str]
    formats: list[str]
    others: list[dict[str, str]] = []

    @property
    def identities(self) -> list[dict[str, str]]:
        """Identities of all ranks' parts, in the order of ranks."""
        return [self.identity, *self.others]


class Hello(_Identities, tag=True):
    """A taker's first message. formats: of pages that it would convert."""


class Refused(_Identities, tag=True):
    """The identities differ: the giver's own. formats: of its pages."""


class Welcome(msgspec.Struct, tag=True):
    """instance: names the giver's process. page_size: tokens. others: the parts of ranks 1 and up.

    The remaining fields are those of rank 0's `Part`.
    """

    instance: str
    identity: dict[str, str]
    agent: bytes
    first: int
    page_size: int
    groups: list[GroupRows]
    others: list[Part] = []

    @property
    def parts(self) -> list[Part]:
        """The parts of all ranks, in order."""
        return [Part(self.identity, self.agent, self.first, self.groups), *self.others]

    @property
    def identities(self) -> list[dict[str, str]]:
        """Identities of all ranks' parts, in the order of ranks."""
        return [part.identity for part in self.parts]


class Find(msgspec.Struct, tag=True):
    """keys: group and hash of each page that is wanted."""

    keys: list[tuple[int, bytes]]


class Found(msgspec.Struct, tag=True):
    """The index of each page that was asked for in the memory of all the giver's ranks, and its checksum.

    The checksum is that of all parts, concatenated. None for a lacking page.
    """

    instance: str
    places: list[tuple[int, bytes] | None]


Question = Hello | Find
Answer = Welcome | Refused | Found

encode = msgspec.msgpack.encode
read_question = msgspec.msgpack.Decoder(Question).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode
