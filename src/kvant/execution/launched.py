"""A step that was launched, and what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvant.execution.batch import Batch, Drafts
from kvant.sampling.sampler import greedy
from kvant.scheduling.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step found, by row of its logits.

    sound: whether the row's largest logit is finite. tokens: the row's token: the most likely one or,
    where `is_final`, the one that was sampled on the device. first_rows: each sequence's first row, one
    more per draft. drafts: tokens that were run behind each sequence's last one, or None.
    """

    sound: list[bool]
    tokens: list[int]
    first_rows: list[int]
    drafts: Drafts | None
    is_final: bool


@dataclass(frozen=True, slots=True)
class Launched:
    """logits: [m, vocab_size], valid until the next launch. read: waits for the step.

    batch: what was run, where the host built it. is_final: whether `Outcome` will be, so that the next
    step may be launched before this one is read.
    """

    schedule: Schedule
    logits: Tensor
    read: Callable[[], Outcome]
    is_final: bool
    batch: Batch | None = None


def on_host(schedule: Schedule, batch: Batch, drafts: Drafts | None, logits: Tensor) -> Launched:
    """A step whose tokens the host chooses from logits [m, vocab_size]."""

    def read() -> Outcome:
        sound, tokens = greedy(logits[: batch.num_sampled])
        return Outcome(sound, tokens, batch.first_rows, drafts, is_final=False)

    return Launched(schedule, logits, read, is_final=False, batch=batch)
