"""A model that can be checked: it remembers tokens in pages, and answers by what it reads there.

Any error of pages, tables, slots, zeroing or chunks makes it read another context and so
give another answer than `answer`, which knows nothing of pages.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvant.engine.engine import Engine
from kvant.engine.result import Result
from kvant.execution.batch import Batch, Drafts, Launched, build_batch, on_host
from kvant.kv.offload.tiers import Tiers
from kvant.kv.pages import CacheIdentity, SharedPages
from kvant.kv.saturation import Saturated
from kvant.plan.limits import Limits
from kvant.scheduling import request
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule

VOCAB = 97
EOS = 3
UNWRITTEN = -1


class RememberingRunner:
    """A `Runner` whose K and V are the tokens themselves.

    poison: called with a context; True makes its logits NaN. fail_at: the run that raises.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.device = torch.device("cpu")
        self.stored = torch.full((num_pages, page_size), -7, dtype=torch.int64)  # of unknown owners
        self.poison: Callable[[list[int]], bool] = lambda context: False
        self.fail_at: int | None = None
        self.steps: list[list[int]] = []  # chunk lengths of every step
        self.num_run_tokens = 0

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        (first,) = pages
        assert 0 not in first
        self.stored[list(first)] = UNWRITTEN

    def check(self) -> None:
        pass

    def count_saturated(self) -> Callable[[], tuple[Saturated, ...]]:
        return lambda: ()

    def num_drafts(self, num_sequences: int) -> Sequence[int]:
        return ()

    def launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None = None) -> Launched:
        batch = build_batch(schedule, table, self.stored.shape[1], drafts)
        return on_host(schedule, batch, drafts, self.run(batch))

    def run(self, batch: Batch) -> Tensor:
        if self.fail_at == len(self.steps):
            self.fail_at = None
            raise RuntimeError("the device is gone")
        step = batch.step
        page_size = self.stored.shape[1]
        flat = self.stored.view(-1)
        assert (flat[step.slot_mapping] == UNWRITTEN).all(), (
            "a slot is written twice or was not cleared"
        )
        assert (step.slot_mapping >= page_size).all(), "the scratch page is written by a request"
        flat[step.slot_mapping] = batch.input_ids
        ends = step.cu_seqlens_q.tolist()
        self.steps.append([b - a for a, b in pairwise(ends)])
        self.num_run_tokens += ends[-1]
        rows = []
        for place in batch.logits_index.tolist():
            sequence = bisect_right(ends, place) - 1
            length = int(step.seqlens_kv[sequence]) - (ends[sequence + 1] - 1 - place)
            pages = step.page_table[sequence, : -(-length // page_size)].long()
            context = self.stored[pages].flatten()[:length].tolist()
            assert step.positions[place] == length - 1
            rows.append(
                torch.full((VOCAB,), torch.nan) if self.poison(context) else logits(context)
            )
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


def logits(context: Sequence[int]) -> Tensor:
    """What the fake model thinks after `context`."""
    seed = int.from_bytes(hashlib.sha256(repr(list(context)).encode()).digest()[:6], "little")
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def answer(prompt: Sequence[int], num_tokens: int, *, eos: int | None = None) -> list[int]:
    """The fake model's greedy answer."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(int(logits(context).argmax()))
        if context[-1] == eos:
            break
    return context[len(prompt) :]


def make_engine(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int | None = None,
    prefix_caching: bool = True,
    max_prompt_logprobs: int = 256,
    prompt_stride: int = 1,
    tokenizer: Tokenizer | None = None,
    seed: int | None = 0,
    eos_token_ids: Sequence[int] = (EOS,),
    offload: Callable[[SharedPages, RememberingRunner], Tiers] | None = None,
) -> tuple[Engine, RememberingRunner]:
    """An engine around a fresh fake model. max_model_len: all the pool can hold by default."""
    runner = RememberingRunner(num_pages, page_size)
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len or (num_pages - 1) * page_size,
        page_size=page_size,
        prefix_caching=prefix_caching,
        max_prompt_logprobs=max_prompt_logprobs,
        prompt_stride=prompt_stride,
    )
    engine = Engine(
        runner,
        limits,
        num_pages,
        identity=CacheIdentity("fake", None, "plan"),
        vocab_size=VOCAB,
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
        seed=seed,
        offload=None if offload is None else lambda shared: offload(shared, runner),
    )
    return engine, runner


def num_computed(engine: Engine, sequence: request.Sequence) -> int:
    """Tokens of a sequence whose K and V are in its pages."""
    return 0 if sequence.row < 0 else int(engine.scheduler.table.num_computed[sequence.row])


def finish(engine: Engine, after_step: Callable[[], None] = lambda: None) -> dict[int, Result]:
    """Steps until nothing is left, each audited; the results that they brought, by number."""
    results = {}
    while engine.has_work:
        for piece in engine.step():
            if piece.result is not None:
                results[piece.number] = piece.result
        engine.audit()
        after_step()
    return results
