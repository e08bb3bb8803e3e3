"""Where the sequences of a step stand in its tokens, and where they keep their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.attention.base import Step
from kvant.errors import EngineFault
from kvant.kv.codecs import codec_for
from kvant.kv.state_pool import StateCache


@dataclass(frozen=True, slots=True)
class Packed:
    """n sequences in T tokens.

    rows: [n] int64, rows of the states. is_new: [n] bool, whether a sequence's first token runs, so that
    it starts from zeros; of padding too. cu_seqlens: [n + 1] int32. lengths: tokens of each sequence on the
    host; None if each has one, as in recorded decodes.
    """

    rows: Tensor
    is_new: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...] | None

    @staticmethod
    def of(step: Step) -> Packed:
        """The step's sequences. EngineFault for a step without rows."""
        if step.rows is None:
            raise EngineFault("a step without rows of states reached a recurrent layer")
        counts = step.cu_seqlens_q[1:] - step.cu_seqlens_q[:-1]
        return Packed(step.rows, step.seqlens_kv <= counts, step.cu_seqlens_q, step.lengths)

    @property
    def on_host(self) -> bool:
        return self.rows.device.type == "cpu"

    def pieces(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Sequences with one token, and (place, first token, tokens) of the others."""
        assert self.lengths is not None
        ones: list[int] = []
        others: list[tuple[int, int, int]] = []
        first = 0
        for place, length in enumerate(self.lengths):
            if length == 1:
                ones.append(place)
            elif length:
                others.append((place, first, length))
            first += length
        return ones, others


def read_state(
    cache: StateCache, packed: Packed, places: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    """States [n, *shape] of some sequences, of all for None; zeros for new ones. A copy."""
    rows, is_new = packed.rows, packed.is_new
    if places is not None:
        index = torch.tensor(places, device=rows.device)
        rows, is_new = rows[index], is_new[index]
    shape = cache.spec.geometry.shape
    stored = tuple(plane[rows] for plane in cache.planes)
    codec = codec_for(cache.spec.choice.dtype)
    found = codec.decode(stored, None, shape[-1], torch.float32).to(dtype)
    return found.masked_fill_(is_new.view(-1, *(1,) * len(shape)), 0.0)


def write_state(
    cache: StateCache, packed: Packed, places: Sequence[int] | None, value: Tensor
) -> None:
    """Store states [n, *shape] of some sequences, of all for None."""
    rows = packed.rows
    if places is not None:
        rows = rows[torch.tensor(places, device=rows.device)]
    codes = codec_for(cache.spec.choice.dtype).encode(value, None)
    for plane, code in zip(cache.planes, codes, strict=True):
        plane[rows] = code
