"""Recorded steps without a GPU: what was recorded is done again, in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvant.engine.llm import LLM
from kvant.execution.runner import ModelRunner

T = TypeVar("T")


class Done:
    """A place in the work of a device that does everything at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Again:
    """A `Recorder` that remembers functions. num_runs: of all of them.

    As on a device, what a recording made holds nothing that means anything until it is replayed.
    """

    def __init__(self) -> None:
        self.num_runs = 0

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        made: Any = run() or ()
        for tensor in made:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1 << 40)

        def replay() -> None:
            self.num_runs += 1
            again: Any = run() or ()
            for old, new in zip(made, again, strict=True):
                old.copy_(new)

        return replay, made

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def mark(self) -> Done:
        return Done()


def record_here(
    runner: ModelRunner,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_drafts: Sequence[int] = (),
    on_progress: object = None,
) -> None:
    """`ModelRunner.capture` as it would be on a GPU."""
    runner.record(Again(), max_num_seqs, max_num_batched_tokens, max_model_len, num_drafts)


def record(llm: LLM, num_drafts: Sequence[int] = ()) -> Again:
    """Let an engine go through recorded steps from now on."""
    engine, runner = llm.engine, llm.engine.runner
    assert isinstance(runner, ModelRunner)
    again, limits = Again(), engine.limits
    runner.record(
        again, limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, num_drafts
    )
    return again
