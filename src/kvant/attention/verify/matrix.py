"""Runs the cells of one row of the support matrix on a real device."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from kvant.attention.base import AttentionBackend
from kvant.attention.need import BackendInfo, DeviceFacts, DeviceKind
from kvant.attention.verify.cells import MASKS, QUERIES, Mask, Row, need_of, refused
from kvant.attention.verify.trial import Trial, run_trial
from kvant.kv.dtype import ComputeDtype

# Shorter sequences accompany a cell's queries, with other page counts and positions in a tile.
_SEQUENCES = {
    1: ((33, 1), (1, 1), (700, 1), (16, 1)),
    16: ((33, 5), (16, 16), (300, 16)),
    512: ((40, 3), (600, 512)),
}
_ODD_ROWS_BESIDE = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """One row of the matrix, to be verified on one backend."""

    backend: BackendInfo
    row: Row
    device: DeviceFacts
    compute: ComputeDtype
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One result. error: error of the worst output row. wrong: what is wrong, or None."""

    error: float
    wrong: str | None


Answer = dict[Mask, str | tuple[Cell, ...]]
"""For each mask, why it is refused, or a cell for each of `QUERIES`."""


class _BackendModule(Protocol):
    def backend(self, *, batch_invariant: bool = False) -> AttentionBackend: ...


def verify_row(asked: Asked) -> Answer:
    """Verifies every cell of a row. A cell that raises has failed; the others still run."""
    no = refused(
        asked.backend,
        asked.row,
        asked.device,
        asked.compute,
        batch_invariant=asked.batch_invariant,
    )
    if len(no) == len(MASKS):
        return dict(no)
    module = cast(_BackendModule, importlib.import_module(asked.backend.module))
    backend = module.backend(batch_invariant=True) if asked.batch_invariant else module.backend()
    return {
        mask: no[mask]
        if mask in no
        else tuple(_verify(backend, asked, mask, count) for count in QUERIES)
        for mask in MASKS
    }


def _verify(backend: AttentionBackend, asked: Asked, mask: Mask, num_queries: int) -> Cell:
    need = need_of(
        asked.row, mask, asked.device, asked.compute, batch_invariant=asked.batch_invariant
    )
    trial = Trial(
        need,
        _SEQUENCES[num_queries],
        odd_rows=num_queries == _ODD_ROWS_BESIDE,
        rounds_long=asked.backend.rounds_long,
    )
    device = torch.device("cpu" if asked.device.kind is DeviceKind.CPU else "cuda")
    try:
        outcome = run_trial(backend, trial, device)
    except Exception as fault:  # from a kernel's compiler or the device: a failed cell
        first = str(fault).strip().splitlines() or [""]
        return Cell(float("nan"), f"{type(fault).__name__}: {first[0][:200]}")
    return Cell(outcome.error, outcome.wrong)
