"""A proposer that knows the answers, and is wrong now and then: any option can be tried with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvant.attention.base import Step
from kvant.engine.engine import Engine
from kvant.execution.batch import Batch
from kvant.execution.speculation import Speculation
from kvant.speculative.base import Ask, Setting
from kvant.speculative.methods import Method
from tests.engine import fakes

METHOD = Method(
    "scripted", "tests.speculative.scripted", has_model=False, num_speculative_tokens=2,
    options={"wrong_every": 3},
)  # fmt: skip


class Scripted:
    """known: whole sequences, prompt and answer. Every `wrong_every`-th place is drafted wrong."""

    taps: tuple[int, ...] = ()

    def __init__(self, known: Sequence[Sequence[int]], vocab_size: int, wrong_every: int) -> None:
        self.known = [list(tokens) for tokens in known]
        self.vocab_size = vocab_size
        self.wrong_every = wrong_every
        self.num_asks: list[int] = []

    def zero(self, pages: Sequence[int]) -> None:
        assert 0 not in pages

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.num_asks.append(len(asks))
        return [self._draft(ask) for ask in asks]

    def learn(self, step: Step, hidden: tuple[Tensor, ...]) -> None:
        raise AssertionError("it has no taps")

    def _draft(self, ask: Ask) -> list[int]:
        tokens, start = list(ask.token_ids), len(ask.token_ids)
        for answer in self.known:
            if answer[:start] == tokens:
                right = answer[start : start + ask.num_tokens]
                return [
                    (token + 1) % self.vocab_size if (start + i) % self.wrong_every == 0 else token
                    for i, token in enumerate(right)
                ]
        return [tokens[-1]] * ask.num_tokens


def build(setting: Setting) -> Scripted:
    return Scripted([], 10, setting.options["wrong_every"])


def speculate(
    engine: Engine, known: Sequence[Sequence[int]], *, most: int = 4, wrong_every: int = 3,
    adaptive: bool = False,
) -> Scripted:  # fmt: skip
    """Let an engine draft from now on."""
    proposer = Scripted(known, engine.vocab_size, wrong_every)
    engine.speculation = Speculation(proposer, most, engine.vocab_size, adaptive=adaptive)
    return proposer


class RewritingRunner(fakes.RememberingRunner):
    """Slots of rejected drafts are written again."""

    def run(self, batch: Batch) -> Tensor:
        flat = self.stored.view(-1)
        flat[batch.step.slot_mapping] = fakes.UNWRITTEN
        return super().run(batch)


def fake_engine(**options: int | bool) -> tuple[Engine, RewritingRunner]:
    """`fakes.make_engine` with a runner that allows it."""
    engine, runner = fakes.make_engine(**options)  # type: ignore[arg-type]
    rewriting = RewritingRunner(*runner.stored.shape)
    rewriting.stored = torch.full_like(rewriting.stored, -7)
    engine.runner = rewriting  # type: ignore[assignment]
    return engine, rewriting
