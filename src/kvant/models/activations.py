"""Chooses how products with narrow weights round activations: by a flag or the checkpoint. No torch."""

from __future__ import annotations

from dataclasses import replace

from kvant.attention.need import DeviceKind
from kvant.errors import NotServable, WayOut
from kvant.kv.dtype import ComputeDtype
from kvant.models.forward_info import ForwardChoice, ForwardFacts
from kvant.models.quantization import Activations, Quantization
from kvant.models.stored import Stored, declared_activations, lists_experts
from kvant.weights.format import FP8_BLOCK, Code, Scale

_OLDEST = 89
_STATIC = "by the scale that the checkpoint has for each layer, in steps of more than 64 tokens"
_DYNAMIC = "by token, or by 128 inputs with weights in blocks, in steps of more than 64 tokens"
_FAST = "by token, in steps of more than 64 tokens, with sums in fewer bits than float32"


def with_activations(
    forward: ForwardChoice, asked: Activations | None, facts: ForwardFacts
) -> ForwardChoice:
    """Returns `forward` with its rounding of activations, and with what decided it.

    A flag wins over a checkpoint's declaration. Raises NotServable, with ways out, if products cannot do as
    it asks. With a declaration that they cannot follow, activations keep 16 bits, and the choice says
    why. Scales of activations are only read if products use them, and memory to decode weights is only
    counted if products do.
    """
    chosen = _decide(forward, asked, facts)
    rounds = chosen.activations is not None and chosen.activations.is_fp8
    if rounds and chosen.info is not None and _rounds_for_experts(chosen.stored, facts):
        rounded = replace(facts, rounds_for_experts=True)
        chosen = replace(chosen, extra_bytes=chosen.info.extra_bytes(rounded))
    if chosen.stored is None or chosen.activations is Activations.FP8_STATIC:
        return chosen
    return replace(chosen, stored=chosen.stored.without_input_scales)


def _decide(
    forward: ForwardChoice, asked: Activations | None, facts: ForwardFacts
) -> ForwardChoice:
    method, stored = facts.quantization, forward.stored
    if asked is Activations.EXACT:
        if method is not None and method.rounds_activations:
            raise NotServable(
                f"--weight-activations exact contradicts --quantization {method.value}",
                why="that method rounds activations",
                ways_out=(WayOut("round weights alone", ("--quantization", "fp8")),),
            )
        return replace(forward, activations_because="16 bits, from --weight-activations exact")
    if asked is Activations.INT8:
        _check_int8(forward, facts)
        because = "int8 by 32 numbers, from --weight-activations"
        return replace(forward, activations=asked, activations_because=because)
    if asked is not None and asked.is_fp8:
        refusal = _refuse_fp8(forward, facts, asked)
        if refusal is not None:
            raise NotServable(
                f"--weight-activations {asked.value} is not available here",
                why=refusal,
                ways_out=(WayOut("run without --weight-activations"),),
            )
        because = f"fp8 {_way(asked)}, from --weight-activations"
        return replace(forward, activations=asked, activations_because=because)
    if method is not None and method.rounds_activations:
        because = f"fp8 {_DYNAMIC}, from --quantization {method.value}"
        if lists_experts(facts.config):
            because += "; products with experts take 16 bits"
        return replace(forward, activations=Activations.FP8, activations_because=because)
    said = declared_activations(facts.config) if stored is None else stored.activations
    if not said:
        return forward
    declared = f"the checkpoint declares {said}"
    if stored is None:
        why = "its weights are decoded while they are loaded"
        because = f"{facts.compute.value}, though {declared}: {why}"
        return replace(forward, activations_because=because)
    wanted = stored.rounding
    refusal = None if wanted is None else _refuse_fp8(forward, facts, wanted)
    if wanted is not None and refusal is None:
        because = f"fp8 {_way(wanted)}, as {declared}"
        return replace(forward, activations=wanted, activations_because=because)
    why = refusal or "Kvant has no products for such activations"
    return replace(forward, activations_because=f"16 bits, though {declared}: {why}")


def _way(asked: Activations) -> str:
    return {Activations.FP8_STATIC: _STATIC, Activations.FP8_FAST: _FAST}.get(asked, _DYNAMIC)


def _refuse_fp8(forward: ForwardChoice, facts: ForwardFacts, asked: Activations) -> str | None:
    """Returns why products cannot round activations to 8-bit floats as asked, or None."""
    static = asked is Activations.FP8_STATIC
    device = facts.device
    if device.capability < _OLDEST:
        return "8-bit floats are multiplied on NVIDIA GPUs from compute capability 8.9 on"
    if facts.compute is not ComputeDtype.BFLOAT16:
        return f"products of 8-bit floats give bfloat16, and the model computes in {facts.compute.value}"
    if facts.batch_invariant:
        return "steps of few tokens do not round, so results would depend on the batch"
    if facts.num_ranks > 1 and not static:
        return "ranks hold parts of a token, which would have scales of their own"
    if lists_experts(facts.config) and not _rounds_for_experts(forward.stored, facts):
        return "products with experts round activations on Hopper GPUs, for weights in blocks of 128 x 128"
    if asked is Activations.FP8_FAST and _has_blocks(forward.stored):
        return "weights in blocks of 128 x 128 are scaled and added in float32 block by block"
    if static and (forward.stored is None or forward.stored.rounding is not asked):
        return "the checkpoint does not have a scale of activations for each layer"
    if facts.quantization in (Quantization.FP8, Quantization.FP8_DYNAMIC):
        return None
    if facts.quantization is not None:
        return f"weights of {facts.quantization.value} are multiplied with 16-bit activations"
    return _refuse_weights(forward.stored)


def _rounds_for_experts(stored: Stored | None, facts: ForwardFacts) -> bool:
    """Whether products with experts can round activations."""
    groups = () if stored is None else stored.groups
    in_blocks = bool(groups) and all(one.format == FP8_BLOCK for _, one in groups)
    return in_blocks and facts.device.arch == "sm_90"


def _has_blocks(stored: Stored | None) -> bool:
    return stored is not None and any(one.format == FP8_BLOCK for _, one in stored.groups)


def _refuse_weights(stored: Stored | None) -> str | None:
    if stored is None:
        return "the model's weights are not quantised, so activations are not rounded for them"
    for _, scheme in stored.groups:
        fmt = scheme.format
        if fmt.code is not Code.E4M3 or fmt.scale is not Scale.FLOAT32:
            return f"weights of {fmt.name} are multiplied with 16-bit activations"
    return None


def _check_int8(forward: ForwardChoice, facts: ForwardFacts) -> None:
    flag = f"--weight-activations {Activations.INT8.value}"
    without = WayOut("run without --weight-activations")
    if facts.device.kind is not DeviceKind.CPU:
        raise NotServable(
            f"{flag} runs on CPUs only",
            why="products on a GPU take 16-bit activations or 8-bit floats",
            ways_out=(without, WayOut("round to 8-bit floats", ("--weight-activations", "fp8"))),
        )
    if not forward.rounds_itself:
        raise NotServable(
            f"{flag} is not available here",
            why=f"the forward {forward.name} multiplies unquantised weights",
            tried=[f"{one.forward}: {one.reason}" for one in forward.refused],
            ways_out=(without,),
        )
    if forward.quantization is None and forward.stored is None:
        raise NotServable(
            f"{flag} changes nothing here",
            why="the model's weights are not quantised, so activations are not rounded for them",
            ways_out=(WayOut("round the weights too", ("--quantization", "int8")), without),
        )
