"""Steps as data: rank 0 sends the part of a schedule that a launch needs; other ranks rebuild the schedule.

Other ranks keep a row table that equals rank 0's in all fields that a launch reads. Page ids are sent as
changes. Sampling parameters and seeds are sent when a row gets a new sequence. A step is one int64 array,
copied to the other ranks without encoding. A step that gives every sequence of the step before its next
token is sent as changes of pages alone: the other ranks know the rest.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as Items
from typing import Any, Literal, TypeAlias, cast, get_args, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvant.execution.batch import Drafts
from kvant.scheduling.request import Sequence
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule
from kvant.speculative.base import Ask

_Name = Literal["int32", "int64", "float64"]
_NAMES: dict[Any, _Name] = {np.dtype(name): name for name in get_args(_Name)}
"""Names of dtypes, since numpy rebuilds a dtype's name on every access."""

STEP, ZERO, NEXT = 1, 2, 3
"""First words of sent arrays; see `kvant.parallel.messages`. NEXT: a step that follows the one before."""

_HEAD, _NEXT_HEAD = 15, 4
_WORDS = struct.Struct(f"{_HEAD}q")
_LIMITS, _MAX_DRAFTS, _NEEDS_HOST, _DRAFTS = 1, 2, 4, 8


class Numbers(msgspec.Struct, frozen=True, array_like=True):
    """An array as bytes in native byte order. dtype: numpy's name of it."""

    dtype: _Name
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(array: NDArray[Any]) -> Numbers:
        """Copies an array [..] of a dtype in `_NAMES`."""
        return Numbers(_NAMES[array.dtype], array.shape, array.tobytes())

    @property
    def array(self) -> NDArray[Any]:
        """The array [*shape], read-only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Table(msgspec.Struct, frozen=True, array_like=True, tag="table"):
    """A whole row table. size: the arguments of `RowTable`. The arrays: the ones that launches read."""

    size: tuple[int, int, int]
    pages: Numbers
    sampling: Numbers
    seeds: Numbers
    num_prompt: Numbers


class Sender:
    """Rank 0's side. Reads a row table's log, and empties it unless the log has another reader."""

    def __init__(self) -> None:
        self._table: RowTable | None = None
        self._memory = np.zeros(1 << 12, np.int64)
        self._end, self._is_new = 0, False
        self._last: _Ran | None = None

    def table(self, table: RowTable, *, log_has_reader: bool) -> Table | None:
        """Returns the table to send before `step` if it was not sent yet, else None."""
        if table is self._table:
            return None
        self._table, self._is_new, self._last = table, True, None
        if table.log is None or not log_has_reader:
            table.start_log()
        return Table(
            (table.num_rows, table.max_pages, table.num_groups), Numbers.of(table.pages),
            Numbers.of(table.sampling), Numbers.of(table.seeds), Numbers.of(table.num_prompt),
        )  # fmt: skip

    def step(
        self, schedule: Schedule, table: RowTable, drafts: Drafts | None, *, log_has_reader: bool,
        cleared: Items[Items[int]] = (),
    ) -> bytes | NDArray[np.int64]:  # fmt: skip
        """Returns a schedule for `Receiver.step`, valid until the next call.

        cleared: pages of each group to zero before the step.
        """
        changes = [] if self._is_new or table.log is None else table.log
        self._is_new = False
        if not log_has_reader:
            table.log = []
        last, self._last = self._last, (schedule.rows, schedule.starts, schedule.counts)
        if last is not None and drafts is None and _follows(schedule, last):
            flat = [NEXT, len(changes), 0, len(cleared)]
            for row, start, pages in changes:
                if not start:
                    break  # a row's first page: it may have a new sequence
                flat += row, start, len(pages)
                flat += pages
            else:
                flat[2] = len(flat) - _NEXT_HEAD
                flat += _listed(cleared)
                return array("q", flat).tobytes()
        return self._whole(schedule, table, drafts, changes, cleared)

    def _whole(
        self, schedule: Schedule, table: RowTable, drafts: Drafts | None,
        changes: Items[tuple[int, int, Items[int]]], cleared: Items[Items[int]],
    ) -> NDArray[np.int64]:  # fmt: skip
        """Runs `step` for a step of any kind."""
        count, prefills = len(schedule.rows), schedule.num_prefills
        decodes = count - prefills
        pieces = schedule.sequences[decodes:]
        spans: list[tuple[int, int]] = []
        if prefills:
            starts = schedule.starts[decodes:].tolist()
            ends = (schedule.starts + schedule.counts)[decodes:].tolist()
            spans = list(zip(starts, ends, strict=True))
        pending = schedule.is_pending[:decodes]
        known = [] if pending.all() else np.flatnonzero(~pending).tolist()
        new = sorted({row for row, start, _ in changes if start == 0})
        limits, max_drafts = schedule.limits, schedule.max_drafts
        states = schedule.states_to_place, schedule.states_to_load, schedule.states_to_keep
        num_drafted = 0 if drafts is None else sum(map(len, drafts))
        num_tokens = sum(end - start for start, end in spans)
        flat = [n for row, start, pages in changes for n in (row, start, len(pages), *pages)]
        zeroed = _listed(cleared)
        self._make_room(
            _HEAD + 7 * count + num_tokens + num_drafted + len(flat)
            + 7 * len(new) + 2 * sum(map(len, states)) + len(zeroed)
        )  # fmt: skip
        _WORDS.pack_into(
            self._memory.data, 0, STEP, count, prefills, schedule.num_drafts,
            (limits is not None) * _LIMITS | (max_drafts is not None) * _MAX_DRAFTS
            | schedule.needs_host * _NEEDS_HOST | (drafts is not None) * _DRAFTS,
            len(known), num_tokens, num_drafted, len(changes), len(flat), len(new),
            *map(len, states), len(cleared),
        )  # fmt: skip
        self._end = _HEAD
        self._add(schedule.rows)
        self._add(schedule.starts)
        self._add(schedule.counts)
        flags = self._memory[self._end : self._end + count]
        np.add(schedule.samples, schedule.is_pending, out=flags, dtype=np.int64)
        flags += schedule.is_pending
        self._end += count
        if limits is not None:
            self._add(limits)
        if max_drafts is not None:
            self._add(max_drafts)
        if known:
            self._add([schedule.sequences[place].token_ids[-1] for place in known])
        if prefills:
            self._add([s.num_prompt_tokens if s.lacks_prompt_logprobs else 0 for s in pieces])
            for sequence, (start, end) in zip(pieces, spans, strict=True):
                self._add(sequence.token_ids[start:end])
        if drafts is not None:
            self._add([len(some) for some in drafts])
            self._add([token for some in drafts for token in some])
        if flat:
            self._add(flat)
        if new:
            self._add(new)
            self._add(table.sampling[new].view(np.int64).reshape(-1))
            self._add(table.seeds[new])
            self._add(table.num_prompt[new])
        for pairs in states:
            if pairs:
                self._add([one for pair in pairs for one in pair])
        if zeroed:
            self._add(zeroed)
        return self._memory[: self._end]

    def _make_room(self, size: int) -> None:
        if size > len(self._memory):
            self._memory = np.zeros(2 * size, np.int64)

    def _add(self, numbers: Items[int] | NDArray[np.int64]) -> None:
        self._memory[self._end : (end := self._end + len(numbers))] = numbers
        self._end = end


_Ran: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Rows, starts and counts of a step, [n] each."""


def _follows(schedule: Schedule, last: _Ran) -> bool:
    """Returns whether a step gives exactly the sequences of the step before one token each, all in flight.

    A row gets another sequence only by a step with a piece of its prompt, which does not follow.
    """
    rows, starts, counts = last
    return (  # bytes are compared several times as fast as `all` finds them equal
        schedule.rows.tobytes() == rows.tobytes()
        and not schedule.num_prefills
        and not schedule.num_drafts
        and not schedule.needs_host
        and schedule.limits is None
        and schedule.max_drafts is None
        and not (schedule.states_to_place or schedule.states_to_load or schedule.states_to_keep)
        and 0 not in schedule.is_pending.tobytes()
        and 0 not in schedule.samples.tobytes()
        and schedule.starts.tobytes() == (starts + counts).tobytes()
    )


class _Reader:
    """Takes one part after another, as views, from an array made by `Sender.step`."""

    def __init__(self, sent: NDArray[np.int64]) -> None:
        self._sent, self._end = sent, _HEAD

    def take(self, count: int) -> NDArray[np.int64]:
        start, self._end = self._end, self._end + count
        return self._sent[start : self._end]

    def rest(self) -> NDArray[np.int64]:
        return self._sent[self._end :]


class Receiver:
    """The side of other ranks: keeps their row table and rebuilds schedules."""

    def __init__(self) -> None:
        self.table = RowTable(0, 0)
        self._last: Schedule | None = None

    def take(self, sent: Table) -> None:
        """Replaces the row table by one that rank 0 sent."""
        self.table = table = RowTable(*sent.size)
        self._last = None
        table.pages[:], table.sampling[:] = sent.pages.array, sent.sampling.array
        table.seeds[:], table.num_prompt[:] = sent.seeds.array, sent.num_prompt.array

    def step(self, sent: NDArray[np.int64]) -> tuple[Schedule, Drafts | None]:
        """Updates the table and returns the schedule and its drafts.

        sent: [n] int64, made by `Sender.step`; the schedule has views of it. The schedule's sequences have
        only the attributes that a launch reads.
        """
        if sent[0] == NEXT:
            self._last = schedule = self._next(sent)
            return schedule, None
        self._last, drafts = self._step(sent)
        return self._last, drafts

    def _next(self, sent: NDArray[np.int64]) -> Schedule:
        last = self._last
        assert last is not None, "a step follows another one"
        _, num_changes, size, num_groups = sent[:_NEXT_HEAD].tolist()
        rest = sent[_NEXT_HEAD:].tolist()
        if num_changes:
            self._change(num_changes, rest)
        cleared = _unlisted(num_groups, rest[size:])
        count = len(last.rows)
        return Schedule(
            cast("list[Sequence]", [_NOTHING] * count), last.rows, last.numbers,
            last.starts + last.counts, np.ones(count, np.int64), np.ones(count, np.bool_),
            0, None, np.ones(count, np.bool_), None, 0, False, cleared, [],
        )  # fmt: skip

    def _step(self, sent: NDArray[np.int64]) -> tuple[Schedule, Drafts | None]:
        (
            _, count, prefills, num_drafts, flags, num_known, num_tokens, num_drafted, num_changes,
            size_of_changes, num_new, to_place, to_load, to_keep, num_groups,
        ) = sent[:_HEAD].tolist()  # fmt: skip
        reader, table, decodes = _Reader(sent), self.table, count - prefills
        take = reader.take
        rows, starts, counts, bits = take(count), take(count), take(count), take(count)
        samples, is_pending = (bits & 1).astype(np.bool_), bits >= 2
        limits = take(count) if flags & _LIMITS else None
        max_drafts = take(count) if flags & _MAX_DRAFTS else None
        sequences = [_NOTHING] * decodes
        if num_known:
            places = np.flatnonzero(~is_pending[:decodes]).tolist()
            for place, token in zip(places, take(num_known).tolist(), strict=True):
                sequences[place] = _Known(_Tokens((token,), 0), 0)
        if prefills:
            scored, tokens = take(prefills).tolist(), take(num_tokens).tolist()
            first = 0
            lengths, begins = counts[decodes:].tolist(), starts[decodes:].tolist()
            for length, start, one in zip(lengths, begins, scored, strict=True):
                sequences.append(_Known(_Tokens(tokens[first : first + length], start), one))
                first += length
        drafts: list[tuple[int, ...]] | None = None
        if flags & _DRAFTS:
            ends = np.cumsum(take(count)).tolist()
            flat = take(num_drafted).tolist()
            drafts = [tuple(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        if num_changes:
            self._change(num_changes, take(size_of_changes).tolist())
        if num_new:
            new = take(num_new)
            table.sampling[new] = take(4 * num_new).view(np.float64).reshape(num_new, 4)
            table.seeds[new] = take(num_new)
            table.num_prompt[new] = take(num_new)
        states = [_pairs(take(2 * size)) for size in (to_place, to_load, to_keep)]
        cleared = _unlisted(num_groups, reader.rest().tolist()) if num_groups else []
        return Schedule(
            cast("list[Sequence]", sequences), rows, table.owner[rows], starts, counts, samples,
            prefills, limits, is_pending, max_drafts, num_drafts, bool(flags & _NEEDS_HOST),
            cleared, [],
            *states,
        ), drafts  # fmt: skip

    def _change(self, count: int, flat: list[int]) -> None:
        """Applies changes of page ids. flat: row, first column, number of pages and pages of each change."""
        table, at = self.table, 0
        for _ in range(count):
            row, start, length = flat[at : at + 3]
            pages = flat[at + 3 : (at := at + 3 + length)]
            table.pages[row, start : start + length] = pages
            if table.log is not None:  # read by this rank's device state
                table.log.append((row, start, pages))


def _pairs(flat: NDArray[np.int64]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in flat.reshape(-1, 2).tolist()]


def _listed(pages: Items[Items[int]]) -> list[int]:
    """Returns pages of each group as one list, each group's after their number."""
    return [n for some in pages for n in (len(some), *some)]


def _unlisted(count: int, flat: list[int]) -> list[list[int]]:
    """Reads what `_listed` made of `count` groups."""
    found, at = [], 0
    for _ in range(count):
        found.append(flat[at + 1 : (at := at + 1 + flat[at])])
    return found


def sent_zero(pages: Items[Items[int]]) -> NDArray[np.int64]:
    """Returns the arguments of `Runner.zero`, pages of each group, as an int64 array."""
    return np.array([ZERO, len(pages), *_listed(pages)], np.int64)


def read_zero(sent: NDArray[np.int64]) -> list[list[int]]:
    """Reads the pages to clear, by group, from sent [n] int64, an array with the first word ZERO."""
    _, count, *flat = sent.tolist()
    return _unlisted(count, flat)


class _Known:
    """The attributes of a sequence that a launch reads. scored: prompt tokens, 0 without logprobs."""

    def __init__(self, token_ids: _Tokens, scored: int) -> None:
        self.token_ids = token_ids
        self.lacks_prompt_logprobs = scored > 0
        self.num_prompt_tokens = scored


class _Tokens:
    """Some tokens of a sequence, indexed by position. first: the position of the first one."""

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
"""A sequence whose newest token comes from a step in flight."""


class SentAsk(msgspec.Struct, frozen=True, array_like=True):
    """An `Ask` as it is sent. num_known: number of the sequence's tokens; newest: the last of them."""

    num_known: int
    newest: int
    held: Items[Items[int]]
    num_tokens: int


def asked(sent: SentAsk) -> Ask:
    """Returns the `Ask` that rank 0 sent to the drafter of every rank."""
    tokens = _Newest(sent.num_known, sent.newest)
    return Ask(cast("Items[int]", tokens), sent.held, sent.num_tokens)


class _Newest:
    """The tokens of a sequence of which only the newest is known."""

    def __init__(self, count: int, newest: int) -> None:
        self._count, self._newest = count, newest

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> int:
        assert at == -1, "ranks know a sequence's newest token alone"
        return self._newest
