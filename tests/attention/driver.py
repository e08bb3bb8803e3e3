"""A simple way to drive attention and models in tests: linear pages, steps built by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvant.attention.base import AttentionBackend, Step, StepCall
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention, LayerGeometry
from kvant.kv.pool import SCRATCH_PAGE, KVPool
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, Scale, ScaleState, Source, StateSpec
from kvant.kv.state_pool import StatePool

PAGE_SIZE = 16
MOST_ROWS = 32


def choice(dtype: KVDtype, *, fixed_scale: float = 1.0) -> Choice:
    takes = dtype.format.takes_outside_scale
    scale = Scale(ScaleState.UNCALIBRATED if takes else ScaleState.NONE, fixed=fixed_scale)
    return Choice(dtype, Source.EXPLICIT, "test", (), scale)


def layer(
    *,
    index: int = 0,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim_k: int = 32,
    head_dim_v: int | None = None,
    window: int | None = None,
    sinks: bool = False,
    softcap: float = 0.0,
    causal: bool = True,
) -> LayerGeometry:
    return LayerGeometry(
        index=index,
        name=f"model.layers.{index}.self_attn",
        attention=Attention.FULL if window is None else Attention.SLIDING,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_k if head_dim_v is None else head_dim_v,
        window=window,
        sinks=sinks,
        softcap=softcap,
        causal=causal,
    )


def plan(
    layers: Sequence[LayerGeometry],
    k: KVDtype = KVDtype.FLOAT32,
    v: KVDtype | None = None,
    *,
    compute: ComputeDtype = ComputeDtype.FLOAT32,
    page_size: int = PAGE_SIZE,
    fixed_scale: float = 1.0,
) -> KVPlan:
    """Every layer that owns KV stores k and v, read by the reference backend."""
    specs = tuple(
        LayerSpec(
            geometry,
            choice(k, fixed_scale=fixed_scale) if geometry.has_kv else None,
            choice(v or k, fixed_scale=fixed_scale)
            if geometry.has_kv and geometry.attention is not Attention.MLA
            else None,
            "reference" if geometry.has_kv or geometry.shared_with is not None else None,
            states=tuple(StateSpec(state, choice(KVDtype.FLOAT32)) for state in geometry.states),
        )
        for geometry in layers
    )
    return KVPlan(Role.TARGET, "test", compute, "test", page_size, specs)


def pool(
    kv_plan: KVPlan, num_pages: int, scales: Mapping[tuple[int, Side], Tensor] | None = None
) -> KVPool:
    return KVPool(kv_plan, num_pages, device=torch.device("cpu"), scales=scales or {})


def step(
    page_tables: Sequence[Sequence[int]],
    seqlens_kv: Sequence[int],
    num_new: Sequence[int],
    *,
    page_size: int = PAGE_SIZE,
    causal: bool = True,
    padding: int = 0,
    rows: Sequence[int] | None = None,
) -> Step:
    """A step that writes the last num_new[i] tokens of sequence i, seqlens_kv[i] long after it.

    Unread entries of the page table hold the scratch page. padding: tokens at the end that belong
    to no sequence and are written nowhere.
    """
    width = max(len(table) for table in page_tables)
    table = torch.full((len(page_tables), width), SCRATCH_PAGE, dtype=torch.int32)
    slots: list[int] = []
    positions: list[int] = []
    for row, (pages, length, new) in enumerate(zip(page_tables, seqlens_kv, num_new, strict=True)):
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for position in range(length - new, length):
            slots.append(pages[position // page_size] * page_size + position % page_size)
            positions.append(position)
    offsets = torch.tensor([0, *num_new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Step(
        cu_seqlens_q=offsets,
        seqlens_kv=torch.tensor(seqlens_kv, dtype=torch.int32),
        page_table=table,
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int64),
        max_seqlen_q=max(num_new),
        max_seqlen_kv=max(seqlens_kv),
        causal=causal,
        rows=None if rows is None else torch.tensor(rows),
        lengths=None if max(num_new) == 1 else tuple(num_new),
    )


@dataclass
class Text:
    """One sequence of a `Driver`: its tokens so far, how many of them are stored, its pages."""

    tokens: list[int]
    stored: int = 0
    pages: list[int] = field(default_factory=list)
    row: int = -1


class Driver:
    """Runs sequences through a pool; hands out pages in order and never takes them back."""

    def __init__(self, kv_pool: KVPool, backend: AttentionBackend) -> None:
        self.pool = kv_pool
        self.backends = (backend,) * len(kv_pool.plan.layers)
        self._next_page = SCRATCH_PAGE + 1
        self._next_row = 0
        plan = kv_pool.plan
        self.states = StatePool(plan, MOST_ROWS, kv_pool.device) if plan.has_states else None

    def call(self, work: Sequence[tuple[Text, int]]) -> tuple[Tensor, StepCall, Tensor]:
        """Input ids, step and last positions for the next n tokens of each sequence.

        Counts them as stored.
        """
        page_size = self.pool.plan.page_size
        ids: list[int] = []
        for sequence, new in work:
            ids += sequence.tokens[sequence.stored : sequence.stored + new]
            sequence.stored += new
            if sequence.row < 0:
                assert self._next_row < MOST_ROWS, "the test has too few rows"
                sequence.row, self._next_row = self._next_row, self._next_row + 1
            while len(sequence.pages) * page_size < sequence.stored:
                assert self._next_page < self.pool.num_pages, "the test's pool is too small"
                sequence.pages.append(self._next_page)
                self._next_page += 1
        made = step(
            [sequence.pages for sequence, _ in work],
            [sequence.stored for sequence, _ in work],
            [new for _, new in work],
            page_size=page_size,
            rows=[sequence.row for sequence, _ in work],
        )
        last = made.cu_seqlens_q[1:].to(torch.int64) - 1
        return torch.tensor(ids), StepCall(made, self.pool, self.backends, self.states), last


class Model(Protocol):
    """What `greedy` needs of a loaded model."""

    def forward(self, input_ids: Tensor, call: StepCall, logits_index: Tensor) -> Tensor: ...


def greedy(
    model: Model,
    kv_pool: KVPool,
    backend: AttentionBackend,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    chunk: int,
) -> list[list[int]]:
    """The next num_tokens of each prompt, all in one packed batch; prompts are read in chunks.

    Prompts of different lengths finish at different times, so steps mix chunks and single tokens.
    """
    made = Driver(kv_pool, backend)
    texts = [Text(list(prompt)) for prompt in prompts]
    full = [len(prompt) + num_tokens for prompt in prompts]
    while any(len(text.tokens) < end for text, end in zip(texts, full, strict=True)):
        running = [t for t, end in zip(texts, full, strict=True) if len(t.tokens) < end]
        work = [(text, min(chunk, len(text.tokens) - text.stored)) for text in running]
        ids, call, last = made.call(work)
        logits = model.forward(ids, call, last)
        for text, token in zip(running, logits.argmax(-1).tolist(), strict=True):
            if text.stored == len(text.tokens):
                text.tokens.append(token)
    return [text.tokens[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
