"""Which sequences of a step bring many queries, known on the host when the step is made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvant.attention.base import LONG, LongQuery, Step


def list_long(step: Step, lengths: NDArray[np.int64], seqlens_kv: NDArray[np.int64]) -> Step:
    """The step with its long sequences listed, and the others as a step of their own.

    lengths: query tokens of each sequence; seqlens_kv: as in the step. Both on the host.
    """
    long = np.flatnonzero(lengths >= LONG)
    if not long.size:
        return step
    first = np.cumsum(lengths) - lengths
    listed = tuple(
        LongQuery(int(i), int(first[i]), int(lengths[i]), int(seqlens_kv[i])) for i in long
    )
    if long.size == lengths.size:
        return replace(step, long=listed)
    others = seqlens_kv.astype(np.int32)
    others[long] = 0
    rest = replace(
        step,
        seqlens_kv=torch.from_numpy(others).to(step.seqlens_kv.device),
        max_seqlen_q=int(np.delete(lengths, long).max()),
        max_seqlen_kv=int(others.max()),
    )
    return replace(step, long=listed, rest=rest)
