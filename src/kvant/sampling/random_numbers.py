"""The random number behind each sampled token, and the numbers a request samples by. No torch.

A token's random number is a hash of the request's seed and the token's place in the answer. So it
depends neither on the batch nor on preemption, and a step can be launched before its inputs are known.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from hashlib import blake2b
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from kvant.sampling.sampling_params import SamplingParams

_two_words = Struct("<qq").pack


def uniform(seed: int, place: int) -> float:
    """The number in [0, 1), with 53 random bits, of one place in one seed's answer."""
    return float(uniforms([seed], [place])[0])


def uniforms(seeds: Items[int], places: Items[int]) -> NDArray[np.float64]:
    """`uniform` of each pair: [n]."""
    digests = [
        blake2b(_two_words(seed, place), digest_size=8).digest()
        for seed, place in zip(seeds, places, strict=True)
    ]
    found: NDArray[np.float64] = (np.frombuffer(b"".join(digests), "<u8") >> 11) / 2**53
    return found


def wishes(params: SamplingParams) -> tuple[float, float, float, float]:
    """temperature, top_k (infinity for none), top_p, min_p; temperature 0 takes the most likely token."""
    if params.is_greedy:
        return 0.0, np.inf, 1.0, 0.0
    top_k = float(params.top_k) if params.top_k > 0 else np.inf
    return params.temperature, top_k, params.top_p, params.min_p
