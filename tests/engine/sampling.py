"""What a row of logits becomes, without an engine."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from kvant.sampling.logit_rules import LogitRules, edited
from kvant.sampling.sampler import RowRequest, RowSampler, Sampled, greedy
from kvant.scheduling.request import Sequence


def sampler_of(logits: Tensor, wanted: Items[tuple[int, Sequence, int]]) -> RowSampler:
    """A sampler of rows of logits [n, vocab]. wanted: row, sequence, drafts before it."""
    requests = [
        RowRequest(
            row,
            one.request.params,
            one.rules,
            one.request.seed,
            one.num_output_tokens + ahead,
            ahead,
        )
        for row, one, ahead in wanted
    ]
    return RowSampler(logits, requests, *greedy(logits))


def sample(logits: Tensor, sequences: Items[Sequence]) -> list[Sampled]:
    """One token for each row of logits [len(sequences), vocab]."""
    rows = sampler_of(logits, [(row, sequence, 0) for row, sequence in enumerate(sequences)])
    return [rows.sample(row) for row in range(len(sequences))]


def ruled(rules: LogitRules, row: Tensor) -> Tensor:
    """A row [vocab] as these rules leave it."""
    return edited(row[None], [rules.edits(row.numel())])[0]
