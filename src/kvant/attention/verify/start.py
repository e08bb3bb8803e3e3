"""At start, verifies the few cells that an engine will use, in the engine's own shapes.

Verification uses separate storage and backends, so it leaves no trace in the engine's pool or backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from kvant.attention.backends import load_backends
from kvant.attention.base import AttentionBackend
from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.reference.info import INFO as REFERENCE
from kvant.attention.select import BACKENDS
from kvant.attention.verify.trial import Trial, run_trial
from kvant.errors import NotServable, WayOut
from kvant.kv.geometry import LayerGeometry
from kvant.kv.spec import KVPlan, LayerSpec, Role, WideRows

_DECODE = ((1, 1), (70, 1))
_PROMPT = ((5, 5), (60, 40))  # enough rows for kernels of many rows, even if few heads share a key
_LONG = ((5, 3), (290, 270))
"""(stored tokens, new tokens in the step) of sequences. Long prompts use other kernels on GPUs."""

_LONGEST = 2048
"""Decodes are verified once more as steps of sequences that may be this long: they use another kernel."""

_WINDOW = 24
"""Longer windows are verified with this length, so that sequences of the trials exceed the window."""

_SINK = 7

_MOST_AT_ONCE = 6
"""Number of trials that compile kernels at the same time; more gain little, since part of it is Python."""


def verify_plan(plan: KVPlan, facts: DeviceFacts, *, batch_invariant: bool = False) -> None:
    """Raises NotServable if a layer's backend writes or reads differently from the format's definition."""
    is_cpu = facts.kind is DeviceKind.CPU
    device = torch.device("cpu" if is_cpu else "cuda")
    steps = (_DECODE, _PROMPT) if is_cpu else (_DECODE, _PROMPT, _LONG)
    backends = load_backends(plan, batch_invariant=batch_invariant)
    rounding = {info.name for info in BACKENDS if info.rounds_long}
    kinds = [(sequences, 0) for sequences in steps] + ([] if is_cpu else [(_DECODE, _LONGEST)])
    trials = [
        (
            layer,
            backend,
            Trial(need, sequences, rounds_long=backend.name in rounding, longest=longest),
        )
        for layer, need in _needs(plan, facts, batch_invariant)
        for backend in [backends[layer.geometry.index]]
        for sequences, longest in kinds
    ]
    if not is_cpu:
        _compile([(backend, trial) for _, backend, trial in trials], device)
    for layer, backend, trial in trials:
        outcome = run_trial(backend, trial, device)
        if outcome.wrong is not None:
            raise _refusal(plan.role, layer, trial.need, trial.sequences, outcome.wrong)


def _compile(trials: list[tuple[AttentionBackend, Trial]], device: torch.device) -> None:
    """Runs all trials at once, so that their kernels are compiled in several threads.

    Their results are not judged: a trial needs the allocator to itself to notice rows that nothing wrote.
    """
    from kvant.kernels.triton.first_launch import one_loads

    gpu = torch.cuda.current_device()
    with (
        one_loads(),
        ThreadPoolExecutor(
            _MOST_AT_ONCE, initializer=torch.cuda.set_device, initargs=(gpu,)
        ) as pool,
    ):
        # A trial that fails here fails again later, where it is judged.
        for held in [pool.submit(run_trial, backend, trial, device) for backend, trial in trials]:
            held.exception()


def _needs(
    plan: KVPlan, facts: DeviceFacts, batch_invariant: bool
) -> Iterator[tuple[LayerSpec, Need]]:
    """Yields each kind of layer once, with its first layer; layers that share KV may attend differently."""
    seen = set()
    owners = {layer.geometry.index: layer for layer in plan.layers}
    for layer in plan.layers:
        g = layer.geometry
        stored = layer if g.shared_with is None else owners[g.shared_with]
        if stored.k is None:
            continue
        need = Need(
            _anonymous(g), stored.k.dtype, None if stored.v is None else stored.v.dtype,
            plan.compute_dtype, plan.page_size, facts, batch_invariant,
            _near(stored.wide),
        )  # fmt: skip
        key = (need, stored.backend)
        if key not in seen:
            seen.add(key)
            yield layer, need


def _anonymous(g: LayerGeometry) -> LayerGeometry:
    """Returns the layer without its index and name."""
    window = None if g.window is None else min(g.window, _WINDOW)
    return replace(g, index=0, name="", shared_with=None, window=window)


def _near(wide: WideRows | None) -> WideRows | None:
    """Returns wide rows with fewer tokens, so that the trials read both forms."""
    if wide is None:
        return None
    return replace(wide, sink=min(wide.sink, _SINK), recent=min(wide.recent, _WINDOW))


def _refusal(
    role: Role, layer: LayerSpec, need: Need, sequences: tuple[tuple[int, int], ...], wrong: str
) -> NotServable:
    g = layer.geometry
    stored = str(need.k) if need.v in (need.k, None) else f"{need.k}/{need.v}"
    mask = "causal" if g.causal else "non-causal"
    if g.window is not None:
        mask += f" with a window of {g.window}"
    if need.wide is not None:
        mask += f", {need.wide}"
    ways = []
    if role is Role.DRAFT:
        ways.append(WayOut("run without --speculative-config"))
    elif layer.backend != REFERENCE.name:
        ways.append(WayOut("take the slow one", ("--attention-backend", REFERENCE.name)))
    ways.append(WayOut("kvant verify shows which cells hold on this device"))
    return NotServable(
        f"the attention backend {layer.backend} computes something else here than {stored} means",
        why=f"checked at start for {g.name}: {wrong}",
        tried=(
            f"{sequences[-1][1]} queries over {sequences[-1][0]} stored tokens, {mask}, head size "
            f"{g.head_dim_k}, computing in {need.compute.value}",
        ),
        ways_out=ways,
    )
