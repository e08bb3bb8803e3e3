"""llama.cpp's file of log-probabilities, written here as its source does, and what Kvant makes of it."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from benchmarks.llama_cpp_kl import LEAST, compare_saved, printed_figures, read_saved

from kvant.errors import BadValue
from kvant.measure.quality.kl_statistics import statistics_of

CONTEXT, VOCAB, WINDOWS = 64, 51, 3
POSITIONS = CONTEXT - 1 - CONTEXT // 2
STEP = 16 / 65535
"""The largest step of log-probabilities in a file. Rounding moves sums of probabilities by less."""
Rows = npt.NDArray[np.float64]


def save(path: Path, tokens: npt.NDArray[np.int32], logits: Rows) -> Rows:
    """Write as `log_softmax` of perplexity.cpp; returns the log-probabilities that the codes stand for."""
    body = [b"_logits_", struct.pack("<3i", CONTEXT, VOCAB, WINDOWS), tokens.tobytes()]
    kept = np.empty_like(logits)
    for i, row in enumerate(logits.reshape(-1, VOCAB)):
        least = max(row.min(), row.max() - 16)
        step = (row.max() - least) / 65535
        log_sum = math.log(np.exp(row - row.max()).sum())
        codes = np.where(row > least, np.rint((row - least) / step), 0)
        lowest = least - row.max() - log_sum
        kept.reshape(-1, VOCAB)[i] = codes * step + lowest
        body += [struct.pack("<2f", step, lowest), np.append(codes, 0).astype("<u2").tobytes()]
    path.write_bytes(b"".join(body))
    return kept


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path, Rows, Rows, npt.NDArray[np.int32]]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (WINDOWS, CONTEXT), dtype=np.int32)
    base = 4 * rng.standard_normal((WINDOWS, POSITIONS, VOCAB))
    base[:, ::2, :3] -= 30  # out of the range of 16 bits
    other = base + 0.3 * rng.standard_normal(base.shape)
    paths = tmp_path / "base", tmp_path / "other"
    return *paths, save(paths[0], tokens, base), save(paths[1], tokens, other), tokens


def test_figures_are_those_of_llama_cpps_sum(
    saved: tuple[Path, Path, Rows, Rows, npt.NDArray[np.int32]],
) -> None:
    base, other, p, q, tokens = saved
    found = compare_saved(base, other)
    expected = np.where(p > LEAST, np.exp(p) * (p - q), 0).sum(-1).reshape(-1)
    np.testing.assert_allclose(found.kl, expected, atol=STEP)
    following = tokens[:, CONTEXT // 2 + 1 :, None].astype(np.int64)
    for given, rows in ((found.baseline_nll, p), (found.nll, q)):
        nll = -np.take_along_axis(rows, following, -1).reshape(-1)
        np.testing.assert_allclose(given, nll, atol=STEP)
    same = (p.argmax(-1) == q.argmax(-1)).mean()
    assert statistics_of(found).same_top == pytest.approx(same)
    assert (p <= LEAST).any(), "some tokens are left out"


def test_other_files_and_texts_are_refused(
    saved: tuple[Path, Path, Rows, Rows, npt.NDArray[np.int32]], tmp_path: Path
) -> None:
    base, other, _, q, tokens = saved
    save(other, tokens[::-1].copy(), q)
    with pytest.raises(BadValue, match="different texts"):
        compare_saved(base, other)
    (tmp_path / "no").write_bytes(b"GGUF....")
    with pytest.raises(BadValue, match="no log-probabilities"):
        next(read_saved(tmp_path / "no"))


def test_printed_figures_are_found_or_missed() -> None:
    log = """Mean PPL(Q)                   :  12.094102 ±   0.722713
Mean PPL(Q)/PPL(base)         :   1.001329 ±   0.001700
Mean    KLD:   0.004167 ±   0.000124
Maximum KLD:   0.101934
99.9%   KLD:   0.076270
99.0%   KLD:   0.032411
Median  KLD:   0.002362
Same top p: 97.255 ± 0.362 %"""
    found = printed_figures(log)
    assert (found["kld_mean"], found["kld_p999"]) == (0.004167, 0.07627)
    assert found["same_top"] == pytest.approx(0.97255)
    assert found["same_top_error"] == pytest.approx(0.00362)
    with pytest.raises(BadValue, match="printed no kld_median"):
        printed_figures(log.replace("Median", "Middle"))
