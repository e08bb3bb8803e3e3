"""`AttentionBackend` that attends to long prompts with FlashInfer and leaves the rest to Triton.

Triton's kernels are as fast or faster for few queries, and CUDA graphs can record them. FlashInfer
plans every step on the host; for `need.LONG` queries and more, that plan costs less than it saves.
Both read the same pages, and Triton's writer fills them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvant.attention.base import AttentionBackend, AttentionParams, Step
from kvant.attention.long import attend_apart
from kvant.errors import EngineFault
from kvant.kv.pool import LayerCache

_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a plan depends on, apart from the step: layers with equal values share a plan."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    params: AttentionParams


@dataclass(frozen=True, slots=True)
class _Planned:
    """FlashInfer's planned wrapper for a step. It keeps the step alive, so that its identity stays valid."""

    step: Step
    wrapper: Any


class FlashInferBackend:
    """Attends to long prompts with FlashInfer. few: writes, and attends to sequences with few queries.

    Not thread-safe: plans and the workspace are reused.
    """

    name = "flashinfer"

    def __init__(self, few: AttentionBackend) -> None:
        self._few = few
        self._workspace: Tensor | None = None
        self._planned: dict[_Kind, _Planned] = {}

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Encodes k, v [T, num_kv_heads, head_dim] into `step.slot_mapping`'s slots; -1 is skipped."""
        self._few.write(cache, k, v, step)

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Attends like `attend_apart`: q [T, num_q_heads, head_dim] -> [T, num_q_heads, head_dim]."""
        return attend_apart(self._few, self._attend_long, cache, q, step, params)

    def _attend_long(
        self, cache: LayerCache, q: Tensor, out: Tensor, step: Step, params: AttentionParams
    ) -> None:
        wrapper, last = self._plan(cache, q, step, params), step.long[-1]
        many = slice(step.long[0].first_token, last.first_token + last.num_tokens)
        wrapper.run(q[many].contiguous(), (cache.k[0], cache.v[0]), out=out[many])

    def _plan(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Any:
        """Returns the wrapper for this step; all layers of one kind share a plan."""
        g = cache.spec.geometry
        kind = _Kind(g.num_q_heads, g.num_kv_heads, g.head_dim_k, cache.page_size, q.dtype, params)
        planned = self._planned.get(kind)
        if planned is not None and planned.step is step:
            return planned.wrapper
        wrapper = self._wrapper(q.device) if planned is None else planned.wrapper
        _plan_step(wrapper, kind, step)
        self._planned[kind] = _Planned(step, wrapper)
        return wrapper

    def _wrapper(self, device: torch.device) -> Any:
        if self._workspace is None:
            self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        flashinfer = importlib.import_module("flashinfer")
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")


def _plan_step(wrapper: Any, kind: _Kind, step: Step) -> None:
    """Plans `step.long` from host numbers and the device's page ids, without waiting for the device."""
    long, size = step.long, kind.page_size
    queries, pages = [0], [0]
    for one in long:
        queries.append(queries[-1] + one.num_tokens)
        pages.append(pages[-1] - (-one.length // size))
    table = step.page_table
    ids = [table[one.sequence, : -(-one.length // size)] for one in long]
    window = kind.params.window
    if window is not None and not step.causal:
        raise EngineFault("a bidirectional window reached FlashInfer, which refuses it")
    wrapper.plan(
        torch.tensor(queries, dtype=torch.int32),
        torch.tensor(pages, dtype=torch.int32),
        torch.cat(ids),
        torch.tensor([(one.length - 1) % size + 1 for one in long], dtype=torch.int32),
        kind.num_q_heads,
        kind.num_kv_heads,
        kind.head_dim,
        size,
        causal=step.causal,
        sm_scale=kind.params.scale,
        window_left=-1 if window is None else window - 1,
        logits_soft_cap=kind.params.softcap or None,
        q_data_type=kind.dtype,
        kv_data_type=kind.dtype,
    )


def backend(*, batch_invariant: bool = False) -> AttentionBackend:
    """Builds the backend for the engine."""
    assert not batch_invariant, "its results depend on the batch, and planning knows"
    from kvant.attention.triton.backend import TritonBackend

    return FlashInferBackend(TritonBackend())
