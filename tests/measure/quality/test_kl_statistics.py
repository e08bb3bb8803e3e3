"""Statistics of KL divergence: llama.cpp's definitions, written out once more without numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from kvant.measure.fidelity import divergences
from kvant.measure.quality.kl_statistics import distances, join, statistics_of


def log_softmax(row: Sequence[float]) -> list[float]:
    most = max(row)
    total = most + math.log(sum(math.exp(x - most) for x in row))
    return [x - total for x in row]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """`mean_and_uncertainty` of perplexity.cpp."""
    mean = sum(values) / len(values)
    spread = sum(x * x for x in values) / len(values) - mean * mean
    return mean, math.sqrt(spread / (len(values) - 1))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    rest = place - low
    return (1 - rest) * ordered[low] + rest * ordered[min(low + 1, len(ordered) - 1)]


@pytest.fixture(scope="module")
def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    base = 3 * torch.randn(301, 50)
    return base, base + 0.3 * torch.randn(301, 50) + 2.0, torch.randint(0, 50, (301,))


def test_every_figure_is_that_of_llama_cpps_formulas(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    base, other, ids = logits
    found = statistics_of(distances(base, other, ids))
    p = [log_softmax(row) for row in base.double().tolist()]
    q = [log_softmax(row) for row in other.double().tolist()]
    kl = [
        sum(math.exp(a) * (a - b) for a, b in zip(x, y, strict=True))
        for x, y in zip(p, q, strict=True)
    ]
    nll = [-row[i] for row, i in zip(q, ids.tolist(), strict=True)]
    nll_base = [-row[i] for row, i in zip(p, ids.tolist(), strict=True)]
    (mean, error), (own, own_error), (theirs, their_error) = map(
        mean_and_error, (kl, nll, nll_base)
    )
    covariance = (sum(a * b for a, b in zip(nll, nll_base, strict=True)) / 301 - own * theirs) / 300
    ratio = math.exp(own - theirs)
    same = sum(x.index(max(x)) == y.index(max(y)) for x, y in zip(p, q, strict=True)) / 301
    expected = {
        "positions": 301,
        "kld_mean": mean,
        "kld_mean_error": error,
        "kld_median": sorted(kl)[150],
        "kld_p99": percentile(kl, 0.99),
        "kld_p999": percentile(kl, 0.999),
        "kld_max": max(kl),
        "same_top": same,
        "same_top_error": math.sqrt(same * (1 - same) / 300),
        "ppl": math.exp(own),
        "ppl_ratio": ratio,
        "ppl_ratio_error": ratio * math.sqrt(own_error**2 + their_error**2 - 2 * covariance),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-5), name


def test_float32_exponentials_are_exact_enough(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    base, _, ids = logits
    near = base + 1e-4 * torch.randn_like(base)
    kl = torch.from_numpy(distances(base, near, ids).kl)
    assert (kl - divergences(base, near)).abs().max() < 3e-8


def test_the_same_logits_are_no_distance_apart(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    base, _, ids = logits
    found = statistics_of(distances(base, base, ids))
    assert (found.kld_max, found.same_top, found.ppl_ratio) == (0, 1, 1)
    assert found.ppl_ratio_error == pytest.approx(0, abs=1e-8)


def test_parts_are_joined_in_order(
    logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    base, other, ids = logits
    whole = distances(base, other, ids)
    cut = [(x[:100], x[100:]) for x in (base, other, ids)]
    halves = join([distances(*(x[half] for x in cut)) for half in (0, 1)])
    assert halves.kl.tolist() == whole.kl.tolist()
    assert halves.same_top.tolist() == whole.same_top.tolist()
    assert len(join([])) == 0
