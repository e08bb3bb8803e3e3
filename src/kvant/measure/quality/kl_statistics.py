"""Distances between distributions over tokens, as defined by llama.cpp's --kl-divergence.

llama.cpp (tools/perplexity/perplexity.cpp) cuts a text into windows of n_ctx tokens and evaluates positions
n_ctx / 2 to n_ctx - 2 of each. Means, error bars, percentiles and the perplexity ratio are computed here as
there. One difference: llama.cpp rounds the baseline's log-probabilities to 16 bits and leaves tokens less
likely than e^-16 out of the sum; here all tokens count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ROWS = 64  # rows at a time, for the processor's cache


@dataclass(frozen=True, slots=True)
class Distances:
    """One value per evaluated position, [positions].

    kl: KL(baseline || this) in nats, float64. nll, baseline_nll: minus the log-likelihood of the token that
    follows, float64. same_top: whether both have the same most likely token, bool.
    """

    kl: npt.NDArray[np.float64]
    nll: npt.NDArray[np.float64]
    baseline_nll: npt.NDArray[np.float64]
    same_top: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kl)

    def __getitem__(self, where: slice) -> Distances:
        return Distances(
            self.kl[where], self.nll[where], self.baseline_nll[where], self.same_top[where]
        )


class Baseline:
    """The baseline's logits, prepared for comparisons at the same positions.

    logits: [positions, vocab_size]. next_ids: [positions], int64, the tokens that follow in the text.
    Exponentials of differences from the maximum are float32 and sums are float64, so a KL divergence
    is exact to about 1e-8 nats; float64 throughout takes ten times as long.
    """

    def __init__(self, logits: Tensor, next_ids: Tensor) -> None:
        self._logits = logits.float()
        self._place = next_ids[:, None]
        self._top = logits.argmax(-1)
        self._probabilities, self._log_sum = _softmax(self._logits)
        self._nll = self._log_sum - self._logits.gather(1, self._place)[:, 0].double()

    def distances(self, logits: Tensor) -> Distances:
        """Returns distances of logits [positions, vocab_size], of any floating dtype, from the baseline."""
        logits = logits.float()
        log_sum = torch.cat([_softmax(rows)[1] for rows in torch.split(logits, _ROWS)])
        nll = log_sum - logits.gather(1, self._place)[:, 0].double()
        off = []
        for p, base, other in zip(
            torch.split(self._probabilities, _ROWS),
            torch.split(self._logits, _ROWS),
            torch.split(logits, _ROWS),
            strict=True,
        ):
            off.append((base - other).mul_(p).sum(-1, dtype=torch.float64))
        kl = (torch.cat(off) - self._log_sum + log_sum).clamp(min=0)  # rounding can make it -1e-9
        same = logits.argmax(-1) == self._top
        return Distances(*(x.cpu().numpy() for x in (kl, nll, self._nll, same)))


def distances(baseline: Tensor, logits: Tensor, next_ids: Tensor) -> Distances:
    """Compares two computations of the same positions, [positions, vocab_size] each; see `Baseline`.

    next_ids: [positions] int64, the tokens that follow.
    """
    return Baseline(baseline, next_ids).distances(logits)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns probabilities, float32, and the logarithm of the sum of exponentials, float64."""
    most = logits.amax(-1, keepdim=True)
    found = (logits - most).exp_()
    total = found.sum(-1, dtype=torch.float64)
    found /= total[:, None].float()
    return found, most[:, 0].double() + total.log()


def join(parts: Sequence[Distances]) -> Distances:
    """Concatenates the positions of all parts; returns none for no parts."""
    none = np.zeros(0)
    return Distances(
        np.concatenate([none, *(part.kl for part in parts)]),
        np.concatenate([none, *(part.nll for part in parts)]),
        np.concatenate([none, *(part.baseline_nll for part in parts)]),
        np.concatenate([none.astype(bool), *(part.same_top for part in parts)]),
    )


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics over all evaluated positions. Errors are standard errors that assume independent positions.

    kld_*: KL divergence in nats. same_top: share of positions, 0 to 1. ppl_ratio: perplexity over the
    baseline's; its error uses the covariance of the two, which read the same text.
    """

    positions: int
    kld_mean: float
    kld_mean_error: float
    kld_median: float
    kld_p99: float
    kld_p999: float
    kld_max: float
    same_top: float
    same_top_error: float
    ppl: float
    ppl_ratio: float
    ppl_ratio_error: float


def statistics_of(found: Distances) -> Statistics:
    """Computes statistics of at least two positions."""
    count = len(found)
    mean, error = _mean_and_error(found.kl)
    median, p99, p999 = np.quantile(found.kl, [0.5, 0.99, 0.999])
    same = float(found.same_top.mean())
    nll, nll_error = _mean_and_error(found.nll)
    base, base_error = _mean_and_error(found.baseline_nll)
    products = float((found.nll * found.baseline_nll).mean())
    covariance = (products - nll * base) / (count - 1)
    variance = nll_error**2 + base_error**2 - 2 * covariance
    ratio = math.exp(nll - base)
    return Statistics(
        positions=count,
        kld_mean=mean,
        kld_mean_error=error,
        kld_median=float(median),
        kld_p99=float(p99),
        kld_p999=float(p999),
        kld_max=float(found.kl.max()),
        same_top=same,
        same_top_error=math.sqrt(same * (1 - same) / (count - 1)),
        ppl=math.exp(nll),
        ppl_ratio=ratio,
        ppl_ratio_error=ratio * math.sqrt(max(variance, 0.0)),
    )


def _mean_and_error(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    mean = float(values.mean())
    variance = float((values**2).mean()) - mean**2
    return mean, math.sqrt(max(variance, 0.0) / (len(values) - 1))
