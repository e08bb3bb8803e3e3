"""The storage of states: pages of an arena, of which each running sequence has one, and rows that name them.

A step knows its sequences by their rows in the scheduler's row table. Nothing clears a page: a sequence whose
first token runs starts from zeros and never reads its page (`kvant.models.recurrent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from kvant.kernels.transfer import to_device
from kvant.kv.geometry import StateKind
from kvant.kv.groups import STATES, ArenaLayout, lay_out
from kvant.kv.pool import SCRATCH_PAGE, Arena
from kvant.kv.spec import KVPlan, StateSpec


@dataclass(frozen=True, slots=True)
class StateCache:
    """One state of one layer.

    planes: [num_pages, *shape[:-1], width] each, in the order of the format. Pages may have any stride.
    drafts: the same state behind drafts that are verified; None without speculation.
    """

    spec: StateSpec
    planes: tuple[Tensor, ...]
    drafts: StateCache | None = None

    @property
    def numbers(self) -> Tensor:
        """The stored numbers [num_pages, *shape] of a format without codes; to be read and written."""
        assert self.spec.choice.dtype.format.is_native
        return self.planes[0]


class StatePool:
    """States of all layers of a plan, in an arena whose layout has a group of them.

    num_rows: rows of the row table; the row behind them is of padding. Without an arena, the pool has one of
    its own, in which every row has a page from the start.
    pages: [num_rows + 1] int64, the page of each row; the scratch page of a row without one, and of padding.
    singly: recurrences run one token at a time, also in prompts. num_drafts: the most drafts of a step. The
    state after each draft is stored apart until it is known which drafts are accepted.
    """

    def __init__(
        self,
        plan: KVPlan,
        num_rows: int,
        device: torch.device,
        arena: Arena | None = None,
        *,
        num_drafts: int = 0,
        singly: bool = False,
    ) -> None:
        self.plan, self.singly = plan, singly
        self.drafts = StatePool(plan, num_drafts, device) if num_drafts else None
        self.pages = torch.full((num_rows + 1,), SCRATCH_PAGE, dtype=torch.int64, device=device)
        if arena is None:
            arena = Arena(_alone(plan), num_rows + 1, device)
            self.pages[:num_rows] = own_page(torch.arange(num_rows, device=device))
        place = len(arena.layout.groups) - 1
        group = arena.layout.groups[place]
        assert group.window == STATES
        self._whole = arena.bytes.view(arena.num_pages(place), group.page_bytes)
        self._states = {
            (layer.geometry.index, state.geometry.kind): StateCache(
                state,
                tuple(planes),
                None
                if self.drafts is None
                else self.drafts.get(layer.geometry.index, state.geometry.kind),
            )
            for layer in plan.layers
            if layer.states
            for state, planes in zip(
                layer.states, arena.state_planes(layer, plan.role), strict=True
            )
        }

    def get(self, layer: int, kind: StateKind) -> StateCache:
        return self._states[layer, kind]

    def place(self, rows: Sequence[int], pages: Sequence[int]) -> None:
        """Gives rows their pages, from the next step on."""
        if rows:
            moved = to_device(torch.tensor([rows, pages]), self.pages.device)
            self.pages.index_copy_(0, moved[0], moved[1])

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole pages, (from, to), one after the other."""
        for source, target in copies:
            self._whole[target].copy_(self._whole[source])

    def accept(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies the states behind the last accepted drafts: (place among drafts, page) each."""
        for place, target in copies:
            assert self.drafts is not None
            self._whole[target].copy_(self.drafts._whole[draft_page(place)])


_Row = TypeVar("_Row", int, Tensor)


def own_page(row: _Row) -> _Row:
    """Returns the page of a row in a pool with an arena of its own, whose first page is for padding."""
    return row + 1


def draft_page(place: int) -> int:
    """Returns the page of a state among drafts: its pool's first page is for padding."""
    return place + 1


def _alone(plan: KVPlan) -> ArenaLayout:
    """Returns an arena of states alone."""
    layout = lay_out(plan, windows=False, states=True)
    states = layout.groups[-1]
    return ArenaLayout(layout.page_size, states.page_bytes, (replace(states, per_superblock=1),))
