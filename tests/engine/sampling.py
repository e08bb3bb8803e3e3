"""What a row of logits becomes, without an engine."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from kvant.execution.sampler import Rows, Sampled
from kvant.sampling.logit_rules import LogitRules, edited
from kvant.scheduling.request import Sequence


def sample(logits: Tensor, sequences: Items[Sequence]) -> list[Sampled]:
    """One token for each row of logits [len(sequences), vocab]."""
    rows = Rows(logits, [(row, sequence, 0) for row, sequence in enumerate(sequences)])
    return [rows.sample(row, sequence) for row, sequence in enumerate(sequences)]


def ruled(rules: LogitRules, row: Tensor) -> Tensor:
    """A row [vocab] as these rules leave it."""
    return edited(row[None], [rules.edits(row.numel())])[0]
