"""The DFlash proposer: owns the drafter's pages and drafts for several sequences in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvant.attention.base import Step, with_groups
from kvant.kv.checkpoint.scales import read_scale_values
from kvant.kv.pool import KVPool
from kvant.speculative.base import Ask, PlannedDraft, Proposer, Setting
from kvant.speculative.dflash.network import DraftNetwork
from kvant.speculative.dflash.weights import load_weights, make_weights


class DFlashProposer:
    """Drafts a block for each sequence in one pass of the drafter.

    pool: K and V of the draft layers under the target's page ids. shares_arena: the drafter's pages lie in
    the target's arena and are cleared with the target's pages.
    """

    def __init__(
        self,
        network: DraftNetwork,
        draft: PlannedDraft,
        pool: KVPool,
        device: torch.device,
        *,
        shares_arena: bool,
    ) -> None:
        self.pool = pool
        self._shares_arena = shares_arena
        self._network = network
        self._facts = draft.facts
        self._page_size = draft.kv.page_size
        self._orders = {layer.causal for layer in draft.geometry.layers}
        self._device = device
        self._clear: Callable[[Sequence[Sequence[int]]], None] = pool.arena.zero
        if device.type != "cpu" and not shares_arena:
            from kvant.kernels.triton.zero import PageEraser

            self._clear = PageEraser([pool.arena.pieces(0)]).clear

    @property
    def taps(self) -> tuple[int, ...]:
        return self._facts.target_layer_ids

    def zero(self, pages: Sequence[int]) -> None:
        if not self._shares_arena:
            self._clear([pages])

    @torch.no_grad()
    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """Fills one block per sequence: its last token and `num_tokens` masks. Returns the drafts."""
        step = self._step(asks)
        starts = np.cumsum([0, *(1 + ask.num_tokens for ask in asks)])
        tokens = np.full(starts[-1], -1, np.int64)
        tokens[starts[:-1]] = [ask.token_ids[-1] for ask in asks]
        filled = self.draft(torch.from_numpy(tokens).to(self._device), step).tolist()
        return [filled[a + 1 : b] for a, b in pairwise(starts.tolist())]

    def draft(self, tokens: Tensor, step: Step) -> Tensor:
        """Fills blocks of tokens [T] int64, where -1 stands for the mask token; returns [T] int64."""
        block = torch.where(tokens < 0, self._facts.mask_token_id, tokens)
        steps = {causal: _ordered(step, causal=causal) for causal in self._orders}
        return self._network.fill(block, steps)

    @torch.no_grad()
    def learn(self, step: Step, hidden: tuple[Tensor, ...]) -> None:
        """Writes a step's context K and V into the drafter's pages. hidden: [T, hidden_size] for each tap."""
        self._network.write_context(hidden, step)

    def _step(self, asks: Sequence[Ask]) -> Step:
        """Returns a step of the blocks of all sequences, concatenated."""
        page_size = self._page_size
        starts = np.array([len(ask.token_ids) - 1 for ask in asks])
        lengths = np.array([1 + ask.num_tokens for ask in asks])
        ends = starts + lengths
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        owners = np.repeat(np.arange(len(asks)), lengths)
        positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - starts, lengths)

        def tensor(array: np.ndarray, dtype: type) -> Tensor:
            return torch.from_numpy(array.astype(dtype)).to(self._device)

        def addresses(group: int) -> tuple[Tensor, Tensor]:
            """Returns the page table [n, columns] int32 and the slots [N] int64 of a page group."""
            table = np.zeros((len(asks), -(-int(ends.max()) // page_size)), np.int32)
            for row, ask, end in zip(table, asks, ends.tolist(), strict=True):
                count = -(-end // page_size)
                row[:count] = ask.held[group][:count]
            slots = table[owners, positions // page_size].astype(np.int64) * page_size
            return tensor(table, np.int32), tensor(slots + positions % page_size, np.int64)

        first, *others = (addresses(group) for group in range(len(asks[0].held)))
        step = Step(
            cu_seqlens_q=tensor(cu_seqlens, np.int32),
            seqlens_kv=tensor(ends, np.int32),
            page_table=first[0],
            slot_mapping=first[1],
            positions=tensor(positions, np.int64),
            max_seqlen_q=int(lengths.max()),
            max_seqlen_kv=int(ends.max()),
        )
        return with_groups(step, others)


def _ordered(step: Step, *, causal: bool) -> Step:
    """Returns the step, for every page group, with or without a causal mask."""
    others = tuple(replace(other, causal=causal) for other in step.others)
    return replace(step, causal=causal, others=others)


def build(setting: Setting) -> Proposer:
    """Loads the planned drafter and allocates its pages, in the target's arena if the plan says so."""
    draft, target = setting.draft, setting.target
    assert draft is not None, "planning gives the method dflash a drafter"
    read = {} if setting.dummy_weights else read_scale_values(draft.path, draft.kv)
    scales = {
        key: torch.tensor(values, dtype=torch.float32, device=target.device)
        for key, values in read.items()
    }
    arena = setting.pool.arena
    shares = arena.layout.holds(draft.kv.role)
    pages = arena if shares else arena.num_pages(0)
    pool = KVPool(draft.kv, pages, device=target.device, scales=scales)
    weights = (make_weights if setting.dummy_weights else load_weights)(draft, target.device)
    network = DraftNetwork(draft, weights, target, pool, setting.max_model_len)
    return DFlashProposer(network, draft, pool, target.device, shares_arena=shares)
