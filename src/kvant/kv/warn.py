"""Warnings of a plan, collected over its layers."""

from __future__ import annotations

from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.checkpoint.lookup import unclaimed
from kvant.kv.format import CheckpointScales, ScalePlace
from kvant.kv.geometry import Attention, spans
from kvant.kv.spec import Choice, KVPlan, ScaleState, Source


def plan_warnings(plan: KVPlan, checkpoint: CheckpointKV) -> tuple[str, ...]:
    """Returns one line per warning, with the layers that it concerns."""
    found: dict[str, list[int]] = {}

    def note(text: str, layer: int) -> None:
        layers = found.setdefault(text, [])
        if layer not in layers:
            layers.append(layer)

    for layer in plan.layers:
        index = layer.geometry.index
        for choice in (layer.k, layer.v):
            if choice is None:
                continue
            for text in _of_choice(choice):
                note(text, index)
        if layer.k is None or layer.k.dtype.format.is_native:
            continue
        if layer.geometry.attention is Attention.MLA:
            note(f"the latent and its rotary part are both stored in {layer.k.dtype}", index)
        if layer.geometry.sinks:
            note(
                f"keys in {layer.k.dtype} under attention sinks: users of llama.cpp saw such a model with "
                "q8_0 keys keep 74.9 % of its most likely tokens; measure before serving: kvant eval",
                index,
            )
    lines = [f"{text} ({_span(layers, len(plan.layers))})" for text, layers in found.items()]
    strays = unclaimed(checkpoint, (layer.geometry for layer in plan.layers))
    return (*lines, *_stored_nowhere(plan), *checkpoint.notes, *strays)


def _stored_nowhere(plan: KVPlan) -> list[str]:
    """Formats that were asked for but that no layer of a small model stores."""
    sides = {
        "keys": [layer.k for layer in plan.layers if layer.k is not None],
        "values": [layer.v for layer in plan.layers if layer.v is not None],
    }
    return [
        f"{side} are in no layer stored as asked: {choices[0].because}"
        for side, choices in sides.items()
        if choices and all(choice.source is Source.FORMAT_DEFAULT for choice in choices)
    ]


def _of_choice(choice: Choice) -> list[str]:
    lines = []
    takes_scale = choice.dtype.format.checkpoint_scales is not CheckpointScales.NEVER
    if choice.scale.state is ScaleState.UNUSED and takes_scale:
        lines.append(f"{choice.dtype} does not use the checkpoint's scales: {choice.scale.because}")
    uncalibrated = choice.scale.state is ScaleState.UNCALIBRATED
    if uncalibrated and choice.dtype.format.scale_place is ScalePlace.PARAMETER:
        lines.append(
            f"{choice.dtype} without calibrated scales stores values times 1.0; ways out: "
            "--kv-cache-dtype fp8_per_token_head, or scales from kvant calibrate"
        )
    if choice.scale.state is ScaleState.MISSING:
        lines.append("the checkpoint promises scales that are not there; 1.0 is used as asked")
    if choice.source is Source.DOWNGRADE:
        lines.append(f"downgraded to {choice.dtype}: {choice.because}")
    return lines


def _span(layers: list[int], total: int) -> str:
    if len(layers) == total:
        return "every layer"
    if len(layers) > 8:
        return f"{len(layers)} of {total} layers"
    return f"layer{'s' if len(layers) > 1 else ''} {spans(layers)}"
