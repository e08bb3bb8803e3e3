"""Makes layers with recurrent states in a transformers model use Kvant's mixers.

    model(input_ids, position_ids=.., use_cache=False, kvant=StepCall)
        -> each such layer: Hooked(hidden [1, T, hidden], .., kvant=StepCall) -> Mixer.run

The step is passed in the keyword `kvant`, as it is to attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from kvant.attention.base import StepCall
from kvant.errors import EngineFault
from kvant.kv.geometry import StateKind
from kvant.models.recurrent.mixers import MIXERS, PAIRED, Framed, LayerStates, Mixer, Product
from kvant.models.recurrent.packed import Packed


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Mixer]]:
    """Yields every module with recurrent states: its path, the module, and Kvant's mixer for it."""
    for name, module in model.named_modules():
        make = MIXERS.get(type(module).__name__)
        if make is not None:
            yield name, module, make(module)


def mixer_of(layer: nn.Module) -> Mixer | None:
    """Returns the mixer of a decoder layer with recurrent states, None for a layer with attention."""
    return next((mixer for _, _, mixer in find_mixers(layer)), None)


def hook_mixers(model: nn.Module) -> None:
    """Replaces the forward of every module with recurrent states. Mutates the modules."""
    for _, module, mixer in find_mixers(model):
        module.forward = Hooked(type(module).__name__, module.layer_idx, mixer)  # type: ignore[arg-type]


class Hooked:
    """The forward of one layer's mixer. Raises EngineFault without a step or planned states."""

    def __init__(self, name: str, layer: int, mixer: Mixer) -> None:
        self._who, self._layer, self._mixer = f"{name} (layer {layer})", layer, mixer
        self._is_paired = name in PAIRED

    def __call__(
        self, hidden_states: Tensor, *_: object, kvant: StepCall | None = None, **__: object
    ) -> Tensor | tuple[Tensor, None]:
        """Runs the mixer: [1, T, hidden] -> [1, T, hidden], with None if the module returns a pair."""
        if kvant is None:
            raise EngineFault(f"{self._who} was called without a step")
        out = run_mixer(self._mixer, hidden_states[0], kvant, self._layer)[None]
        return (out, None) if self._is_paired else out


def run_mixer(
    mixer: Mixer, x: Tensor, call: StepCall, layer: int, multiply: Product = F.linear
) -> Tensor:
    """Runs one layer's mixer: x [T, hidden] -> [T, hidden]. Raises EngineFault without planned states.

    multiply: as in `LayerStates`.
    """
    return mixer.run(x, _states(mixer, call, layer, multiply))


def run_framed(mixer: Framed, projected: Tensor, call: StepCall, layer: int) -> Tensor:
    """Runs `Framed.between`: projected [T, rows] -> [T, columns].

    Raises EngineFault without planned states.
    """
    return mixer.between(projected, _states(mixer, call, layer, F.linear))


def _states(mixer: Mixer, call: StepCall, layer: int, multiply: Product) -> LayerStates:
    who = f"{type(mixer).__name__} of layer {layer}"
    if call.states is None:
        raise EngineFault(f"{who} was called without states")
    planned = tuple(state.geometry for state in call.states.plan.layers[layer].states)
    if planned != mixer.states:
        raise EngineFault(f"{who} keeps {mixer.states}, the plan says {planned}")
    kinds = {state.kind for state in planned}
    conv, recurrent = (
        call.states.get(layer, kind) if kind in kinds else None
        for kind in (StateKind.CONV, StateKind.RECURRENT)
    )
    return LayerStates(
        Packed.of(call.step, call.states.pages, singly=call.states.singly),
        conv,
        recurrent,
        multiply,
    )
