"""What tiers ask of places outside of the process that have pages: files, and memory of other engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvant.kv.offload.moves import Key


class Wanted(NamedTuple):
    """A page that a request may want: its place in the prompt, and its hash."""

    place: int
    digest: bytes


class Prompt(NamedTuple):
    """The request whose pages are looked for. Hashes of an engine of other formats begin otherwise."""

    salt: str
    token_ids: Sequence[int]


class Source(Protocol):
    """Finds and reads pages in threads of its own. All methods belong to the engine's thread.

    tier: its name in counters.
    """

    @property
    def tier(self) -> str: ...

    @property
    def num_bad(self) -> int:
        """Pages that were not what they should be."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it can be asked now."""
        ...

    @property
    def is_probing(self) -> bool:
        """Whether it looks for pages, whose results `take_probed` will tell."""
        ...

    def has(self, key: Key) -> bool:
        """Whether a page was seen; it may be gone."""
        ...

    def probe(
        self, number: int, pages: Sequence[Wanted], windows: Sequence[int | None], prompt: Prompt
    ) -> None:
        """Look for a sequence's pages, in order, up to one that a group without window lacks.

        number: of the request. windows: tokens that each group keeps, None for all.
        """
        ...

    def read(self, reads: Iterable[tuple[Key, memoryview]]) -> None:
        """Read pages into rows of host memory, each of which is checked."""
        ...

    def take_read(self) -> list[tuple[Key, bytes | None, float]]:
        """Pages that were read, their checksums, and the seconds it took; None for one that was missing."""
        ...

    def take_probed(self) -> list[int]:
        """Requests whose pages were looked for."""
        ...

    def touch(self, keys: Sequence[Key]) -> None:
        """Note that pages were used, the first ones of a sequence first."""
        ...

    def forget(self, key: Key) -> None:
        """Read a page no more, whose contents are not trusted."""
        ...
