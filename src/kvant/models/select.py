"""Chooses, at plan time, the forward that runs a model, and keeps the others' reasons. No torch.

To add a forward, write a package under `kvant/models/` with a torch-free `info.py`, and add one line here.
"""

from __future__ import annotations

from kvant.errors import NotServable, WayOut
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import Attention
from kvant.models.cpu.info import INFO as CPU
from kvant.models.forward_info import ForwardChoice, ForwardFacts, ForwardInfo, Refused
from kvant.models.fused.few_rows_info import INFO as FEW_ROWS
from kvant.models.fused.info import INFO as FUSED
from kvant.models.modules.info import INFO as MODULES

FORWARDS: tuple[ForwardInfo, ...] = (CPU, FEW_ROWS, FUSED, MODULES)
"""Every forward, fastest first: the first that does not refuse runs the model."""


def select_forward(facts: ForwardFacts) -> ForwardChoice:
    """Returns the first forward that runs this model, with the reasons of the forwards before it.

    Raises NotServable if no forward runs it with the given flags.
    """
    if facts.geometry.not_runnable is not None:
        why = facts.geometry.not_runnable
        return ForwardChoice(None, tuple(Refused(info.name, why) for info in FORWARDS))
    refused: list[Refused] = []
    for info in FORWARDS:
        reason = info.refuse(facts)
        if reason is None:
            return choose(info, facts, refused=tuple(refused))
        refused.append(Refused(info.name, reason))
    raise _nothing_runs(facts, refused)


def choose(
    info: ForwardInfo, facts: ForwardFacts, *, refused: tuple[Refused, ...] = ()
) -> ForwardChoice:
    """Returns the choice of one forward, which must not refuse these facts."""
    # On a CPU one forward multiplies narrow weights; for others they are decoded while they are loaded.
    keeps = not facts.on_cpu or info.rounds_itself
    return ForwardChoice(
        info,
        refused,
        info.extra_bytes(facts),
        facts.quantization,
        facts.batch_invariant,
        facts.stored if keeps else None,
        matrices=_matrices(info, facts),
    )


def _matrices(info: ForwardInfo, facts: ForwardFacts) -> ComputeDtype | None:
    """Returns the dtype that matrices keep where it is not the one computed in.

    Numbers of bfloat16 are exact in float32.
    """
    if not info.rounds_itself or facts.has_narrow or facts.compute is not ComputeDtype.FLOAT32:
        return None
    return facts.matrices if facts.matrices is ComputeDtype.BFLOAT16 else None


def _nothing_runs(facts: ForwardFacts, refused: list[Refused]) -> NotServable:
    name, ways = facts.geometry.architecture, []
    if facts.quantization is not None:
        what = f"--quantization {facts.quantization.value} is not available for {name}"
        ways.append(WayOut("run without --quantization"))
    elif not facts.batch_invariant:
        what = f"{name} cannot run with the weights of this checkpoint"
        ways.append(WayOut("take a checkpoint whose weights are not quantised"))
    else:
        what = f"--batch-invariant cannot be promised for {name} here"
        ways.append(WayOut("run without --batch-invariant"))
        latents = any(layer.attention is Attention.MLA for layer in facts.geometry.layers)
        if not facts.on_cpu and not (latents and facts.geometry.has_states):
            ways.append(WayOut("run on the CPU", ("--device", "cpu")))
    return NotServable(
        what,
        why="no forward can run it so",
        tried=[f"{one.forward}: {one.reason}" for one in refused],
        ways_out=ways,
    )
