"""What tiers ask of places outside of the process that have pages: files, and memory of other engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvant.kv.offload.moves import Key
from kvant.kv.offload.stats import TierCounts

if TYPE_CHECKING:  # it needs a library that only engines with tiers need
    from kvant.kv.offload.page_files import PageFiles


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
        """Looks for a sequence's pages, in order, up to one that a group without window lacks.

        number: of the request. windows: tokens that each group keeps, None for all.
        """
        ...

    def read(self, reads: Iterable[tuple[Key, int]]) -> None:
        """Reads pages into pages of host memory, each of which is checked."""
        ...

    def take_read(self) -> list[tuple[Key, bytes | None, float]]:
        """Pages that were read, their checksums, and the seconds it took; None for one that was missing."""
        ...

    def take_probed(self) -> list[int]:
        """Requests whose pages were looked for."""
        ...

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that pages were used, the first ones of a sequence first."""
        ...

    def forget(self, key: Key) -> None:
        """Stops reading a page whose contents are not trusted."""
        ...


class Files(Source, Protocol):
    """Page files: a source that keeps pages, too.

    store: of this process. others: of other ranks, which hold their parts of each page.
    """

    @property
    def store(self) -> PageFiles: ...

    @property
    def others(self) -> Sequence[PageFiles]: ...

    @property
    def num_pages(self) -> int:
        """Pages of this identity that were seen."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all page files in the directory, as far as they were seen."""
        ...

    @property
    def takes_writes(self) -> bool:
        """Whether more pages may be written now."""
        ...

    def write(self, writes: Iterable[tuple[Key, int, bytes]]) -> None:
        """Writes pages of host memory: what they are, where they lie, and their checksums.

        May change `takes_writes` between two of them.
        """
        ...

    def take_written(self) -> list[tuple[Key, bool]]:
        """Pages that are no longer needed in host memory, and whether files have them now."""
        ...

    def forget_own(self) -> None:
        """Removes every file that this process wrote."""
        ...

    def counted(self, counts: TierCounts) -> TierCounts:
        """Counts of another place together with evicted files."""
        ...
