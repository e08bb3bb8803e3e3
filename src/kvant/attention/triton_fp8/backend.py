"""Attention that multiplies long prompts in fp8 and leaves everything else to Triton's backend.

Pages, writers, few queries and CUDA graphs are the Triton backend's. So a step with a piece of a
prompt that a graph replays is not rounded, because it has no `Step.long`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvant.attention.base import (
    AttentionBackend,
    AttentionParams,
    HeadRotation,
    RotatingWriter,
    Step,
)
from kvant.attention.long import AttendLong, attend_apart
from kvant.errors import NotServable, WayOut
from kvant.kv.pool import LayerCache


class _Few(AttentionBackend, RotatingWriter, Protocol):
    """A backend that can also rotate what it writes."""


class TritonFp8Backend:
    """few: the backend that writes, and attends to sequences with few queries.

    attend_long: attends to the others.
    """

    name = "triton_fp8"

    def __init__(self, few: _Few, attend_long: AttendLong) -> None:
        self._few = few
        self._attend_long = attend_long

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Encodes k, v [T, num_kv_heads, head_dim] into `step.slot_mapping`'s slots; -1 is skipped."""
        self._few.write(cache, k, v, step)

    def write_rotated(
        self, cache: LayerCache, qkv: Tensor, rotation: HeadRotation, step: Step
    ) -> Tensor:
        """Implements `RotatingWriter.write_rotated`: qkv [T, heads * head_dim] -> q [T, heads, head_dim]."""
        return self._few.write_rotated(cache, qkv, rotation, step)

    def attend_rotated(
        self,
        cache: LayerCache,
        qkv: Tensor,
        rotation: HeadRotation,
        step: Step,
        params: AttentionParams,
    ) -> Tensor | None:
        """Implements `RotatingWriter.attend_rotated`: qkv [T, heads * head_dim] -> [T, q_heads, head_dim]."""
        return self._few.attend_rotated(cache, qkv, rotation, step, params)

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Attends like `attend_apart`: q [T, num_q_heads, head_dim] -> [T, num_q_heads, head_dim]."""
        return attend_apart(self._few, self._attend_long, cache, q, step, params)


def backend(*, batch_invariant: bool = False) -> AttentionBackend:
    """Builds the backend for the engine. Raises NotServable if its kernel cannot be compiled."""
    assert not batch_invariant, "its results depend on the batch, and planning knows"
    from kvant.attention.cuda.fp8_prompts import attend_long
    from kvant.attention.triton.backend import TritonBackend
    from kvant.kernels.cuda.build import unavailable

    reason = unavailable()
    if reason is not None:
        raise NotServable(
            f"the attention backend {TritonFp8Backend.name} cannot run here",
            why=reason,
            ways_out=(WayOut("let Kvant choose the backend", ("--attention-backend", "auto")),),
        )
    return TritonFp8Backend(TritonBackend(), attend_long)
