"""A drafter whose drafts are accepted with a given frequency, to time speculation without trained weights.

Drafter and verifier do all of their work; only the accepted drafts are fixed beforehand, by a long list
of counts, drawn once, which every sequence reads at different places. The target's logits are changed
so that the most likely token is the draft, or is not. So answers mean nothing, and everything after the
logits, acceptance on the device included, runs as usual.

Counts are drawn as if each draft were accepted with the same probability once its predecessors are: the
probability that gives the mean. Use `"method": "benchmarks.replayed:REPLAY"` in a speculative configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.attention.base import Step, StepCall
from kvant.speculative.base import Proposer, Setting
from kvant.speculative.dflash import proposer as dflash
from kvant.speculative.methods import Method

REPLAY = Method(
    "replay",
    "benchmarks.replayed",
    has_model=True,
    options={"hundredths_of_mean": 640, "seed": 1},
)
"""hundredths_of_mean: hundred times the mean tokens per sequence and step, with a full block of drafts.

They include the target's own token.
"""

_ENTRIES = 1 << 16


def stand_probability(mean: float, most: int) -> float:
    """Returns the acceptance probability with which `most` drafts give `mean` new tokens per step."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**place for place in range(most + 1)) < mean:
            low = middle
        else:
            high = middle
    return low


def accepted_counts(mean: float, most: int, seed: int) -> NDArray[np.int64]:
    """Returns how many of `most` drafts are accepted, [65536] int64."""
    probability = stand_probability(mean, most)
    stands = np.random.default_rng(seed).random((_ENTRIES, most)) < probability
    counts: NDArray[np.int64] = np.cumprod(stands, axis=1).sum(axis=1)
    return counts


def build(setting: Setting) -> Proposer:
    """Builds the DFlash proposer, and makes the target follow the list from now on."""
    assert setting.draft is not None
    most = setting.draft.facts.block_size - 1
    mean = setting.options["hundredths_of_mean"] / 100
    counts = accepted_counts(mean, most, setting.options["seed"])
    entries = torch.from_numpy(counts).to(setting.target.device)
    target = setting.target
    forward = target.forward_with_hidden

    def replayed(
        input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        logits, hidden = forward(input_ids, call, logits_index, layers)
        if 1 < call.step.max_seqlen_q <= 1 + most and len(logits) == len(input_ids):
            decide(logits, input_ids, call.step, entries)
        return logits, hidden

    target.forward_with_hidden = replayed  # type: ignore[method-assign]
    return dflash.build(setting)


def decide(logits: Tensor, input_ids: Tensor, step: Step, entries: Tensor) -> None:
    """Makes the draft after every row its most likely token, or another token.

    logits: changed, [T, vocab].
    """
    rows = torch.arange(len(input_ids), device=input_ids.device)
    cu_seqlens = step.cu_seqlens_q.to(torch.int64)
    owners = torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp_(max=len(cu_seqlens) - 2)
    first = cu_seqlens[owners]
    # Primes, so that neighbours and following steps read far from each other.
    entry = (step.positions[first] * 7919 + owners * 104729) % len(entries)
    stands = rows - first < entries[entry]
    draft = input_ids.roll(-1)
    token = torch.where(stands, draft, (draft + 1) % logits.shape[1])
    logits.scatter_(1, token[:, None], torch.finfo(logits.dtype).max)
