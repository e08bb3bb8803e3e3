"""Distance of a format's predictions from float32 KV: KL divergence and agreement on the top token."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One plan against a baseline over the same text.

    mean_kl: mean over positions of KL(baseline || this), in nats. same_top: share of positions
    where both have the same most likely token.
    """

    mean_kl: float
    same_top: float
    num_tokens: int


def passage() -> str:
    """Returns the short bundled text (prose, numbers, a few lines of code)."""
    return files("kvant.measure").joinpath("passage.txt").read_text(encoding="utf-8")


def divergences(baseline: Tensor, logits: Tensor) -> Tensor:
    """Returns KL(baseline || this) per position in nats, float64 [tokens]; both [tokens, vocab_size]."""
    p = torch.log_softmax(baseline.double(), -1)
    q = torch.log_softmax(logits.double(), -1)
    return (p.exp() * (p - q)).sum(-1)


def compare(baseline: Tensor, logits: Tensor) -> Fidelity:
    """Compares logits with a baseline, both [tokens, vocab_size], in float64."""
    same = (baseline.argmax(-1) == logits.argmax(-1)).double().mean()
    return Fidelity(divergences(baseline, logits).mean().item(), same.item(), len(baseline))
