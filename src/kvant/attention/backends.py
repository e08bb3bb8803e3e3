"""Load the backends that a plan names, one object per backend."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from kvant.attention.base import AttentionBackend
from kvant.attention.select import BACKENDS
from kvant.errors import EngineFault, NotServable, WayOut
from kvant.kv.spec import KVPlan


class _BackendModule(Protocol):
    def backend(self, *, batch_invariant: bool = False) -> AttentionBackend: ...


def _import(name: str, module: str) -> _BackendModule:
    try:
        return cast(_BackendModule, importlib.import_module(module))
    except ModuleNotFoundError as fault:
        raise NotServable(
            f"the attention backend {name} cannot run here",
            why=f"the package {fault.name} is not installed",
            ways_out=(
                WayOut(f"pip install {fault.name}"),
                WayOut("take the slow one", ("--attention-backend", "reference")),
            ),
        ) from fault


def load_backends(plan: KVPlan, *, batch_invariant: bool = False) -> tuple[AttentionBackend, ...]:
    """Returns the backend of every layer, by layer index; layers that share KV have their owner's backend.

    batch_invariant: as in the plan; see `BackendInfo`.
    """
    modules = {info.name: info.module for info in BACKENDS}
    able = {info.name for info in BACKENDS if info.batch_invariant}
    loaded: dict[str, AttentionBackend] = {}

    def load(name: str) -> AttentionBackend:
        if name not in loaded:
            module = _import(name, modules[name])
            if not batch_invariant:
                loaded[name] = module.backend()
            elif name in able:
                loaded[name] = module.backend(batch_invariant=True)
            else:
                raise EngineFault(f"backend {name} was planned, but is not batch-invariant")
        return loaded[name]

    names: list[str | None] = [layer.backend for layer in plan.layers]
    for layer in plan.layers:
        if layer.geometry.shared_with is not None:
            names[layer.geometry.index] = names[layer.geometry.shared_with]
    first = next((name for name in names if name is not None), None)
    if first is None:
        raise EngineFault(f"no layer of {plan.model} has an attention backend")
    # Layers without attention never use their entry; the tuple only needs the model's length.
    return tuple(load(name or first) for name in names)
