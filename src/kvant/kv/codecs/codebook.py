"""Centroids of the Lloyd-Max quantiser of a standard normal variable, in steps of 1/256.

The best 8 and 16 levels for N(0, 1) (J. Max, Quantizing for minimum distortion, 1960, table I),
rounded so that they are exact in every float format; what rounding costs in distortion is below
0.02 %. Code c means CENTROIDS[c], ascending; the nearest one is found by the middles between them.
"""

from __future__ import annotations

import itertools


def _both_signs(magnitudes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(-m / 256 for m in reversed(magnitudes)) + tuple(m / 256 for m in magnitudes)


def middles(centroids: tuple[float, ...]) -> tuple[float, ...]:
    """Bounds between neighbouring centroids; a number on one belongs to the lower."""
    return tuple((a + b) / 2 for a, b in itertools.pairwise(centroids))


CENTROIDS_4BIT = _both_signs((33, 99, 168, 241, 322, 414, 530, 700))
CENTROIDS_3BIT = _both_signs((63, 194, 344, 551))
