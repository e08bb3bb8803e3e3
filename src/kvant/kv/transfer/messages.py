"""What two engines tell each other before pages move: identities first, addresses only if they agree.

A taker asks over ZeroMQ, a giver answers; one message each, in MessagePack. Contents of pages never pass
here: the taker reads them from the giver's memory over NIXL.
"""

from __future__ import annotations

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


class Hello(msgspec.Struct, tag=True):
    """A taker's first message. identity: `PageIdentity.fields`. formats: of pages that it would convert."""

    version: int
    identity: dict[str, str]
    formats: list[str]


class Refused(msgspec.Struct, tag=True):
    """The identities differ: those of the giver, and its formats' names."""

    version: int
    identity: dict[str, str]
    formats: list[str]


class Welcome(msgspec.Struct, tag=True):
    """instance: names the giver's process. agent: NIXL's metadata. first: address of its first page.

    page_size: tokens.
    """

    instance: str
    identity: dict[str, str]
    agent: bytes
    first: int
    page_size: int
    groups: list[GroupRows]


class Find(msgspec.Struct, tag=True):
    """keys: group and hash of each page that is wanted."""

    keys: list[tuple[int, bytes]]


class Found(msgspec.Struct, tag=True):
    """Where the giver's memory has each page that was asked for, and its checksum; None for a lacking one."""

    instance: str
    places: list[tuple[int, bytes] | None]


Question = Hello | Find
Answer = Welcome | Refused | Found

encode = msgspec.msgpack.encode
read_question = msgspec.msgpack.Decoder(Question).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode
