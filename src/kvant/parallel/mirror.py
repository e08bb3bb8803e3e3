"""A step as data: what rank 0 sends of a schedule, and the schedule that other ranks make of it.

Other ranks keep a row table whose rows equal rank 0's, as far as a launch reads them. Page ids travel as
changes; sampling parameters and seeds travel when a row gets a new sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Literal, cast, get_args, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvant.execution.batch import Drafts
from kvant.scheduling.request import Sequence
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule
from kvant.speculative.base import Ask

_Name = Literal["bool", "int32", "int64", "float64"]
_NAMES: dict[Any, _Name] = {np.dtype(name): name for name in get_args(_Name)}
"""numpy makes the name of a dtype anew each time it is asked."""


class Numbers(msgspec.Struct, frozen=True, array_like=True):
    """An array as bytes in native order. dtype: numpy's name."""

    dtype: _Name
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(array: NDArray[Any]) -> Numbers:
        return Numbers(_NAMES[array.dtype], array.shape, array.tobytes())

    @property
    def array(self) -> NDArray[Any]:
        """The array [*shape], which may be written."""
        return np.frombuffer(bytearray(self.data), self.dtype).reshape(self.shape)


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a table. sampling [n, 4], seeds [n], num_prompt [n]: of rows with a new sequence."""

    rows: Numbers
    sampling: Numbers
    seeds: Numbers
    num_prompt: Numbers


class Whole(msgspec.Struct, frozen=True, array_like=True):
    """A table's size, as `RowTable` takes it, and its page ids [num_rows, ..]."""

    size: tuple[int, ...]
    pages: Numbers


class SentStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A schedule without its sequences. newest: of each sequence with one token whose token is not pending.

    tokens, scored: of each piece of a prompt, the tokens that the step runs, and the number of prompt tokens
    if they are scored, else 0. whole: a table that was not sent before, else None. changes: of its page ids,
    as its log has them. The other fields are the schedule's.
    """

    newest: list[int]
    tokens: list[Items[int]]
    scored: list[int]
    rows: Numbers
    starts: Numbers
    counts: Numbers
    samples: Numbers
    num_prefills: int
    limits: Numbers | None
    is_pending: Numbers
    max_drafts: Numbers | None
    num_drafts: int
    needs_host: bool
    drafts: list[tuple[int, ...]] | None
    whole: Whole | None
    changes: list[tuple[int, int, Items[int]]]
    new: Rows
    states_to_place: list[tuple[int, int]]
    states_to_load: list[tuple[int, int]]
    states_to_keep: list[tuple[int, int]]


class Sender:
    """Rank 0's side. Reads a table's log; empties it unless `log_has_reader`, who does it then."""

    def __init__(self) -> None:
        self._table: RowTable | None = None

    def step(
        self, schedule: Schedule, table: RowTable, drafts: Drafts | None, *, log_has_reader: bool
    ) -> SentStep:
        whole, changes = None, list[tuple[int, int, Items[int]]]()
        if table is not self._table:
            self._table = table
            whole = Whole(
                (table.num_rows, table.max_pages, table.num_groups), Numbers.of(table.pages)
            )
            new = np.arange(table.num_rows)
            if table.log is None or not log_has_reader:
                table.start_log()
        else:
            changes = list(table.log or ())
            if not log_has_reader:
                table.log = []
            new = np.array(sorted({row for row, start, _ in changes if start == 0}), np.int64)
        decodes = schedule.num_decodes
        known = np.flatnonzero(~schedule.is_pending[:decodes]).tolist()
        pieces = schedule.sequences[decodes:]
        starts, counts = schedule.starts[decodes:].tolist(), schedule.counts[decodes:].tolist()
        return SentStep(
            [schedule.sequences[place].token_ids[-1] for place in known],
            [
                sequence.token_ids[start : start + count]
                for sequence, start, count in zip(pieces, starts, counts, strict=True)
            ],
            [s.num_prompt_tokens if s.lacks_prompt_logprobs else 0 for s in pieces],
            Numbers.of(schedule.rows), Numbers.of(schedule.starts), Numbers.of(schedule.counts),
            Numbers.of(schedule.samples), schedule.num_prefills, _maybe(schedule.limits),
            Numbers.of(schedule.is_pending), _maybe(schedule.max_drafts), schedule.num_drafts,
            schedule.needs_host, None if drafts is None else list(drafts), whole, changes,
            Rows(
                Numbers.of(new), Numbers.of(table.sampling[new]), Numbers.of(table.seeds[new]),
                Numbers.of(table.num_prompt[new]),
            ),
            schedule.states_to_place, schedule.states_to_load, schedule.states_to_keep,
        )  # fmt: skip


def _maybe(array: NDArray[Any] | None) -> Numbers | None:
    return None if array is None else Numbers.of(array)


class Receiver:
    """The side of other ranks: their row table, and schedules over it."""

    def __init__(self) -> None:
        self.table = RowTable(0, 0)

    def step(self, sent: SentStep) -> Schedule:
        """Update the table; return the schedule, whose sequences know only what a launch asks."""
        if sent.whole is not None:
            self.table = RowTable(*sent.whole.size)
            self.table.pages[:] = sent.whole.pages.array
        table, new = self.table, sent.new.rows.array
        table.sampling[new] = sent.new.sampling.array
        table.seeds[new] = sent.new.seeds.array
        table.num_prompt[new] = sent.new.num_prompt.array
        for row, start, pages in sent.changes:
            table.pages[row, start : start + len(pages)] = pages
        if table.log is not None:  # of this rank's device
            table.log += sent.changes
        rows, starts, is_pending = sent.rows.array, sent.starts.array, sent.is_pending.array
        decodes = len(rows) - sent.num_prefills
        sequences = [_NOTHING] * decodes
        for place, token in zip(np.flatnonzero(~is_pending[:decodes]), sent.newest, strict=True):
            sequences[place] = _Known(_Tokens((token,), 0), 0)
        sequences += [
            _Known(_Tokens(tokens, start), scored)
            for tokens, start, scored in zip(
                sent.tokens, starts[decodes:].tolist(), sent.scored, strict=True
            )
        ]
        return Schedule(
            cast("list[Sequence]", sequences), rows, table.owner[rows], starts,
            sent.counts.array, sent.samples.array, sent.num_prefills,
            None if sent.limits is None else sent.limits.array, is_pending,
            None if sent.max_drafts is None else sent.max_drafts.array, sent.num_drafts,
            sent.needs_host, [], [], sent.states_to_place, sent.states_to_load, sent.states_to_keep,
        )  # fmt: skip


class _Known:
    """What a launch asks of a sequence."""

    def __init__(self, token_ids: _Tokens, scored: int) -> None:
        self.token_ids = token_ids
        self.lacks_prompt_logprobs = scored > 0
        self.num_prompt_tokens = scored


class _Tokens:
    """Tokens of a sequence from position `first` on."""

    def __init__(self, tokens: Items[int], first: int) -> None:
        self._tokens, self._first = tokens, first

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Items[int]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self._tokens[at.start - self._first : at.stop - self._first]
        return self._tokens[at if at < 0 else at - self._first]


_NOTHING = _Known(_Tokens((), 0), 0)
"""A sequence whose token a launched step finds."""


class SentAsk(msgspec.Struct, frozen=True, array_like=True):
    """An `Ask` of a drafter. num_known: tokens of the sequence; newest: the last of them."""

    num_known: int
    newest: int
    held: Items[Items[int]]
    num_tokens: int


def asked(sent: SentAsk) -> Ask:
    """What rank 0 asks the drafter of every rank."""
    tokens = _Newest(sent.num_known, sent.newest)
    return Ask(cast("Items[int]", tokens), sent.held, sent.num_tokens)


class _Newest:
    """Tokens of a sequence of which the newest is known."""

    def __init__(self, count: int, newest: int) -> None:
        self._count, self._newest = count, newest

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> int:
        assert at == -1, "ranks know a sequence's newest token alone"
        return self._newest
