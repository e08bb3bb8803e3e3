"""Proof that every planned layer reached its backend.

An architecture that ignores transformers' attention interface would compute without Kvant's pages.
So a model's first forward runs with watched backends.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kvant.attention.base import (
    AttentionBackend,
    AttentionParams,
    HeadRotation,
    RotatingWriter,
    Step,
    StepCall,
)
from kvant.errors import EngineFault
from kvant.kv.pool import LayerCache


class WatchedBackend:
    """Forwards all calls to another backend and records which ones occurred."""

    def __init__(self, watched: AttentionBackend) -> None:
        self.watched = watched
        self.name = watched.name
        self.wrote = False
        self.attended = False

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Forwards `AttentionBackend.write`: k, v [T, num_kv_heads, head_dim]."""
        self.watched.write(cache, k, v, step)
        self.wrote = True

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Forwards `AttentionBackend.attend`: q [T, num_q_heads, head_dim_k]."""
        out = self.watched.attend(cache, q, step, params)
        self.attended = True
        return out


class WatchedRotatingBackend(WatchedBackend):
    """A watched backend that rotates; a watched forward must give the same bits as later ones."""

    def write_rotated(
        self, cache: LayerCache, qkv: Tensor, rotation: HeadRotation, step: Step
    ) -> Tensor:
        """Forwards `RotatingWriter.write_rotated`: qkv [T, (num_q_heads + 2 num_kv_heads) * head_dim]."""
        assert isinstance(self.watched, RotatingWriter)
        q = self.watched.write_rotated(cache, qkv, rotation, step)
        self.wrote = True
        return q

    def attend_rotated(
        self,
        cache: LayerCache,
        qkv: Tensor,
        rotation: HeadRotation,
        step: Step,
        params: AttentionParams,
    ) -> Tensor | None:
        """Forwards `RotatingWriter.attend_rotated`: qkv [T, (num_q_heads + 2 num_kv_heads) * head_dim]."""
        assert isinstance(self.watched, RotatingWriter)
        out = self.watched.attend_rotated(cache, qkv, rotation, step, params)
        if out is not None:
            self.wrote = self.attended = True
        return out


def watch(call: StepCall) -> tuple[StepCall, tuple[WatchedBackend, ...]]:
    """Returns the call with watched backends, and the watched backends by layer index."""
    backends = tuple(
        (WatchedRotatingBackend if isinstance(backend, RotatingWriter) else WatchedBackend)(backend)
        for backend in call.backends
    )
    return dataclasses.replace(call, backends=backends), backends


def check_all_were_reached(call: StepCall, backends: tuple[WatchedBackend, ...], who: str) -> None:
    """Raises EngineFault unless every layer with KV wrote and attended, and every sharing layer attended.

    who: the class of the model, for the message.
    """
    silent: list[str] = []
    for spec in call.pool.plan.layers:
        layer, backend = spec.geometry, backends[spec.geometry.index]
        reached = backend.attended and (backend.wrote or not layer.has_kv)
        if (layer.has_kv or layer.shared_with is not None) and not reached:
            silent.append(layer.name)
    if silent:
        raise EngineFault(
            f"{who} does not attend through Kvant's pages in {', '.join(silent)}: "
            "its attention does not go through transformers' attention interface"
        )
