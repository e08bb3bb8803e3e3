"""The storage of states: one row per running sequence, and a scratch row behind them.

A row is the sequence's row of the scheduler's row table. Nothing clears a row: a sequence whose first token
runs starts from zeros and never reads its row (`kvant.models.recurrent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import TORCH_ELEMENT
from kvant.kv.geometry import StateKind
from kvant.kv.pool import zeros
from kvant.kv.spec import KVPlan, StateSpec


@dataclass(frozen=True, slots=True)
class StateCache:
    """One state of one layer.

    planes: [num_rows + 1, *shape[:-1], width] each, in the order of the format.
    """

    spec: StateSpec
    planes: tuple[Tensor, ...]

    @property
    def numbers(self) -> Tensor:
        """The stored numbers [num_rows + 1, *shape] of a format without codes; to be read and written."""
        assert self.spec.choice.dtype.format.is_native
        return self.planes[0]


class StatePool:
    """States of all layers of a plan for `num_rows` sequences; row `scratch_row` is of padding.

    num_slots: rows behind that one, for states that are kept.
    """

    def __init__(
        self, plan: KVPlan, num_rows: int, device: torch.device, num_slots: int = 0
    ) -> None:
        self.plan = plan
        self.scratch_row = num_rows
        self._states = {
            (layer.geometry.index, state.geometry.kind): _allocate(
                state, num_rows + 1 + num_slots, device
            )
            for layer in plan.layers
            for state in layer.states
        }

    def get(self, layer: int, kind: StateKind) -> StateCache:
        return self._states[layer, kind]

    def load(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Copy kept states into rows."""
        self._copy([self.scratch_row + 1 + slot for slot in slots], rows)

    def keep(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the states of rows into slots."""
        self._copy(rows, [self.scratch_row + 1 + slot for slot in slots])

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for state in self._states.values():
            for plane in state.planes:
                for source, target in zip(sources, targets, strict=True):
                    plane[target].copy_(plane[source])

    @property
    def num_bytes(self) -> int:
        """Bytes actually allocated."""
        planes = [plane for state in self._states.values() for plane in state.planes]
        return sum(plane.numel() * plane.element_size() for plane in planes)


def _allocate(state: StateSpec, num_rows: int, device: torch.device) -> StateCache:
    shape = (num_rows, *state.geometry.shape[:-1])
    return StateCache(
        state,
        tuple(zeros((*shape, p.width), TORCH_ELEMENT[p.element], device) for p in state.planes),
    )
