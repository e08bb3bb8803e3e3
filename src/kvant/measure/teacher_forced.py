"""The logits of a model at every position of given texts, read through the paged cache.

A text is read in pieces, so most positions attend over keys and values that an earlier step stored, as in
generation. Attention always reads stored bytes, also for the tokens of its own step. Pieces of
one token are decode steps; pieces of `kvant.attention.need.LONG` tokens are long queries, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvant.attention.backends import load_backends
from kvant.attention.base import AttentionBackend, Step, StepCall
from kvant.attention.long import list_long
from kvant.execution.recorder import Recorder
from kvant.kv.format import Side
from kvant.kv.pool import SCRATCH_PAGE, KVPool
from kvant.kv.spec import KVPlan
from kvant.kv.state_pool import StatePool, own_page
from kvant.models.loaded import LoadedModel

CHUNK = 128


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded step of one token of every text, and the tensors that it reads and writes.

    ids: [num_texts] int64; place: [1] int64, position of these tokens; logits: [num_texts, vocab_size].
    replay: repeats the step.
    """

    ids: Tensor
    place: Tensor
    logits: Tensor
    replay: Callable[[], None]

    def read(self, token_ids: Tensor, position: int) -> Tensor:
        """Appends token_ids [num_texts, 1] int64 at `position`. Returns logits [num_texts, vocab_size]."""
        self.ids.copy_(token_ids[:, 0])
        self.place.fill_(position)
        self.replay()
        return self.logits.clone()


class TextReader:
    """Reads texts side by side with the KV cache and states stored as in `plan`, in separate pools.

    plan: may differ from the model's plan in formats and backends only. num_texts: number of texts. length:
    their maximum number of tokens. backend: replaces the plan's backends for every layer; backends: likewise,
    by layer. scales: float32 tensors outside the pages, [1] or [num_kv_heads], by layer and side; None for
    the checkpoint's. first_position: the rotary position of the texts' first tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        plan: KVPlan,
        num_texts: int,
        length: int,
        *,
        backend: AttentionBackend | None = None,
        backends: tuple[AttentionBackend, ...] | None = None,
        scales: Mapping[tuple[int, Side], Tensor] | None = None,
        first_position: int = 0,
    ) -> None:
        self.position = self._marked = 0
        self._first_position = first_position
        self._model = model
        self._num_texts = num_texts
        self._page_size = plan.page_size
        self._pages = -(-length // plan.page_size)
        device = model.device
        num_pages = SCRATCH_PAGE + 1 + num_texts * self._pages
        given = model.scales_for(plan) if scales is None else scales
        self._pool = KVPool(plan, num_pages, device=device, scales=given)
        if backends is not None:
            self._backends = backends
        elif backend is None:
            self._backends = load_backends(plan, batch_invariant=model.batch_invariant)
        else:
            self._backends = (backend,) * len(plan.layers)
        pages = torch.arange(SCRATCH_PAGE + 1, num_pages, dtype=torch.int32, device=device)
        self._table = pages.view(num_texts, self._pages)
        self._rows: Tensor | None = None
        self._states: StatePool | None = None
        if plan.has_states:  # twice: as they are, and as they were when `mark` was called
            self._rows = torch.arange(num_texts, device=device)
            self._states = StatePool(plan, 2 * num_texts, device, singly=model.batch_invariant)
        self._recorded: _Recorded | None = None

    def read(self, token_ids: Tensor) -> Tensor:
        """Appends tokens to every text; returns the logits after each of them, [num_texts, n, vocab_size].

        token_ids: [num_texts, n], int64, on the model's device. Stores the keys and values of these tokens
        and moves `position` past them.
        """
        count, texts = token_ids.shape[1], self._num_texts
        if count == 1 and self._recorded is not None:
            logits = self._recorded.read(token_ids, self.position)
            self.position += 1
            return logits[:, None]
        index = torch.arange(texts * count, device=token_ids.device)
        return self._step(token_ids, index).view(texts, count, -1)

    def fill(self, token_ids: Tensor) -> None:
        """Appends token_ids [num_texts, n] int64 like `read`, without computing logits."""
        self._step(token_ids, torch.tensor([token_ids.numel() - 1], device=token_ids.device))

    def record(self, recorder: Recorder) -> None:
        """Records a step of one token of every text, which `read` repeats from then on.

        Overwrites the rows at `position`. Texts with recurrent states are read as before, because recording a
        step would change them.
        """
        if self._states is not None:
            return
        texts, device = self._num_texts, self._table.device
        ids = torch.zeros(texts, dtype=torch.int64, device=device)
        place = torch.full((1,), self.position, dtype=torch.int64, device=device)

        def run() -> tuple[Tensor]:
            # A recording reads ids, place, pages, states and weights where they are now, so the reader keeps
            # them. All else is made here: a tensor of this function alone would be freed when it returns.
            pages = self._table.index_select(1, place // self._page_size)[:, 0].long()
            step = Step(
                cu_seqlens_q=torch.arange(texts + 1, dtype=torch.int32, device=device),
                seqlens_kv=(place + 1).to(torch.int32).repeat(texts),
                page_table=self._table,
                slot_mapping=pages * self._page_size + place % self._page_size,
                positions=(place + self._first_position).repeat(texts),
                max_seqlen_q=1,
                max_seqlen_kv=self._pages * self._page_size,
            )
            call = StepCall(step, self._pool, self._backends)
            index = torch.arange(texts, device=device)
            return (self._model.forward(ids, call, index),)

        replay, (logits,) = recorder.record(run)
        self._recorded = _Recorded(ids, place, logits, replay)

    def mark(self) -> None:
        """Keeps this position and its states, to which `rewind` returns."""
        self._marked = self.position
        self._copy_states(0, self._num_texts)

    def rewind(self) -> None:
        """Returns to the position of the last `mark`, or to the beginning."""
        self.position = self._marked
        self._copy_states(self._num_texts, 0)

    def _copy_states(self, source: int, target: int) -> None:
        if self._states is not None:
            self._states.copy(
                [(own_page(source + i), own_page(target + i)) for i in range(self._num_texts)]
            )

    def _step(self, token_ids: Tensor, index: Tensor) -> Tensor:
        """Runs a step; returns logits [len(index), vocab_size] at places `index` of the packed tokens."""
        count, texts = token_ids.shape[1], self._num_texts
        start, end = self.position, self.position + count
        device = token_ids.device
        positions = torch.arange(start, end, device=device)
        pages = self._table[:, positions // self._page_size].long()
        slots = pages * self._page_size + positions % self._page_size
        step = Step(
            cu_seqlens_q=torch.arange(texts + 1, dtype=torch.int32, device=device) * count,
            seqlens_kv=torch.full((texts,), end, dtype=torch.int32, device=device),
            page_table=self._table,
            slot_mapping=slots.reshape(-1),
            positions=(positions + self._first_position).repeat(texts),
            max_seqlen_q=count,
            max_seqlen_kv=end,
            rows=self._rows,
            lengths=None if count == 1 else (count,) * texts,
        )
        step = list_long(step, np.full(texts, count), np.full(texts, end))
        call = StepCall(step, self._pool, self._backends, self._states)
        logits = self._model.forward(token_ids.reshape(-1), call, index)
        self.position = end
        return logits


def text_logits(
    model: LoadedModel,
    plan: KVPlan,
    token_ids: Sequence[int],
    *,
    chunk: int = CHUNK,
    backend: AttentionBackend | None = None,
) -> Tensor:
    """Returns the logits after each token of one text, [len(token_ids), vocab_size]; see `TextReader`."""
    reader = TextReader(model, plan, 1, len(token_ids), backend=backend)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=model.device)[None]
    return torch.cat([reader.read(part)[0] for part in torch.split(ids, chunk, dim=1)])
