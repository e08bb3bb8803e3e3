"""Runs the whole support matrix on this machine's device, several rows at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvant.attention.need import BackendInfo, DeviceFacts, DeviceKind
from kvant.attention.verify.cells import Row, rows
from kvant.attention.verify.matrix import Answer, Asked, Cell, verify_row
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.measure.facts import processor
from kvant.measure.support import Device, Tree, tree_of

OnProgress = Callable[[int, int], None]
"""Called with the number of finished rows and of all rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The part of the matrix to run; empty for all of it."""

    formats: tuple[tuple[KVDtype, KVDtype], ...] = ()
    head_sizes: tuple[int, ...] = ()

    def rows(self) -> list[Row]:
        """Returns the rows to run; adds formats and head sizes outside the matrix."""
        if not self.formats:
            return [row for row in rows() if not self.head_sizes or row.head_dim in self.head_sizes]
        whole = list(rows())
        usual = sorted({row.head_dim for row in whole if row.v is not None})
        found = [
            Row(k, v, size) for k, v in self.formats for size in self.head_sizes or tuple(usual)
        ]
        more = [
            row
            for row in whole
            if (row.v is None and (row.k, row.k) in self.formats)
            or (row.wide is not None and (row.k, row.v) in self.formats)
        ]
        return found + [
            row for row in more if not self.head_sizes or row.head_dim in self.head_sizes
        ]


def device_here(facts: DeviceFacts, compute: ComputeDtype) -> Device:
    name = processor() if facts.kind is DeviceKind.CPU else torch.cuda.get_device_name()
    return Device(name, facts, compute)


def verify(
    backends: Sequence[BackendInfo],
    device: Device,
    wanted: Choice,
    *,
    batch_invariant: bool = False,
    jobs: int = 1,
    on_progress: OnProgress | None = None,
) -> dict[str, Tree]:
    """Returns `support.tree_of` of all rows, by backend. jobs: number of processes; 1 uses this one."""
    asked = [
        Asked(info, row, device.facts, device.compute, batch_invariant)
        for info in backends
        for row in wanted.rows()
    ]
    # The slowest rows start first, so that no process runs one alone at the end.
    order = sorted(range(len(asked)), key=lambda i: -asked[i].row.head_dim)
    answers: dict[int, Answer] = {}
    for done, (index, answer) in enumerate(_run([asked[i] for i in order], jobs), start=1):
        answers[order[index]] = answer
        if on_progress is not None:
            on_progress(done, len(asked))
    found: dict[str, Tree] = {}
    for info in backends:
        mine = [i for i, one in enumerate(asked) if one.backend is info]
        found[info.name] = tree_of((asked[i].row, _plain(answers[i])) for i in mine)
    return found


def _run(asked: Sequence[Asked], jobs: int) -> Iterator[tuple[int, Answer]]:
    """Yields answers as they finish, with their index in `asked`."""
    if jobs == 1:
        yield from enumerate(map(verify_row, asked))
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.imap_unordered(_numbered, enumerate(asked))


def _numbered(one: tuple[int, Asked]) -> tuple[int, Answer]:
    return one[0], verify_row(one[1])


def _plain(answer: Answer) -> dict[str, Any]:
    return {
        str(mask): found if isinstance(found, str) else [_number(cell) for cell in found]
        for mask, found in answer.items()
    }


def _number(cell: Cell) -> float | str:
    return float(f"{cell.error:.1e}") if cell.wrong is None else cell.wrong
