"""Centroids of the Lloyd-Max quantiser of a standard normal variable, in steps of 1/256.

The best 16 and 8 levels for N(0, 1) (J. Max, Quantizing for minimum distortion, 1960, table I),
rounded so that they are exact in every float format. Codes are a sign and a magnitude: code 0 is the
smallest positive centroid, and the upper half of the codes are the negatives of the lower.
"""

from __future__ import annotations

import itertools


def _signed(magnitudes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(m / 256 for m in magnitudes) + tuple(-m / 256 for m in magnitudes)


def middles(centroids: tuple[float, ...]) -> tuple[float, ...]:
    """Bounds between the magnitudes of neighbours; a magnitude on one belongs to the lower."""
    positive = centroids[: len(centroids) // 2]
    return tuple((a + b) / 2 for a, b in itertools.pairwise(positive))


CENTROIDS_4BIT = _signed((33, 99, 168, 241, 322, 414, 530, 700))
CENTROIDS_3BIT = _signed((63, 194, 344, 551))
