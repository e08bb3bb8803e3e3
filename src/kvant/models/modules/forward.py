"""The forward through transformers' own modules, whose attention calls Kvant's hook."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvant.attention.base import StepCall
from kvant.attention.hook import ATTENTION_NAME
from kvant.kv.spec import KVPlan
from kvant.models.forward import ExpertBytes, apply_head
from kvant.models.forward_info import ForwardChoice
from kvant.models.invariant.linear import TiledLinear, prove_all
from kvant.models.invariant.mode import Paused, RowByRow
from kvant.models.modules.keywords import handing_over
from kvant.models.sharding.divide import Group


def make(
    module: PreTrainedModel, plan: KVPlan, choice: ForwardChoice, group: Group | None = None
) -> ModuleForward:
    """Builds the forward of a loaded module. Raises NotServable if no tile of rows is batch-invariant here.

    group: unused, because the hooks of a divided module already have it.
    """
    if not choice.batch_invariant:
        return ModuleForward(module)
    linear = TiledLinear()
    prove_all(linear, module)
    return ModuleForward(module, RowByRow(linear, type(module).__name__))


class ModuleForward:
    """Calls the module as transformers does. mode: makes rows independent of each other; None without."""

    def __init__(self, module: PreTrainedModel, mode: RowByRow | None = None) -> None:
        self._module = module
        self._mode = mode
        takes = inspect.signature(module.forward).parameters
        self._keeps_rows = "logits_to_keep" in takes

    @property
    def extra_bytes(self) -> int:
        return 0

    @property
    def own_weight_bytes(self) -> int:
        return 0

    @property
    def expert_bytes(self) -> tuple[ExpertBytes, ...]:
        config = self._module.config.get_text_config(decoder=True)
        top_k = getattr(config, "num_experts_per_tok", None)
        if not top_k:
            return ()
        return tuple(
            ExpertBytes(count, top_k, sum(one.nbytes for one in part.parameters(recurse=False)))
            for part, count in _experts_in(self._module)
        )

    @property
    def compiled_seconds(self) -> float | None:
        return None

    def score(self, hidden: Tensor) -> Tensor:
        """Implements `Forward.score`: hidden [n, hidden_size] -> logits [n, vocab_size]."""
        return apply_head(self._module, hidden)

    def run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Implements `Forward.run`: logits [n, vocab_size], and outputs [T, hidden_size] of `layers`."""
        mode = self._mode
        if mode is None:
            return self._call(input_ids, call, logits_index, layers)
        backends = {id(backend): Paused(backend, mode) for backend in call.backends}
        paused = tuple(backends[id(backend)] for backend in call.backends)
        with mode:
            return self._call(
                input_ids, dataclasses.replace(call, backends=paused), logits_index, layers
            )

    def _call(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows = {"logits_to_keep": logits_index} if self._keeps_rows else {}
        with _tap(self._module, layers) as taps, handing_over(self._module, call):
            out = self._module(
                input_ids=input_ids[None],  # the packed tokens as a batch of one
                position_ids=call.step.positions[None],
                use_cache=False,
                **{ATTENTION_NAME: call, **rows},
            )
        logits = out.logits[0] if self._keeps_rows else out.logits[0, logits_index]
        return logits, tuple(taps[index] for index in layers)


def _experts_in(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yields modules that hold all experts of a layer, transformers' or narrow ones, and their numbers."""
    for part in module.modules():
        count = getattr(part, "num_experts", None)
        holds_weights = hasattr(part, "down_proj")  # a router has a number of experts too
        if isinstance(count, int) and holds_weights:
            yield part, count


@contextmanager
def _tap(module: PreTrainedModel, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Inside, the outputs of the wanted decoder layers arrive in the dict, without the batch dimension.

    transformers' own `output_hidden_states=[..]` means other layers in 5.17 than in 5.23, and
    gives the last layer's output after the final norm. Forwards of other threads are ignored.
    """
    taps: dict[int, Tensor] = {}
    if not wanted:
        yield taps
        return
    layers = module.get_decoder().layers  # type: ignore[no-untyped-call]
    assert isinstance(layers, nn.ModuleList)
    own = threading.get_ident()

    def keep(index: int, output: object) -> None:
        if threading.get_ident() != own:  # the hook is on the layer, so every thread calls it
            return
        first = output[0] if isinstance(output, tuple) else output
        assert isinstance(first, Tensor)
        taps[index] = first[0]

    handles = [
        layers[index].register_forward_hook(
            lambda _module, _inputs, output, index=index: keep(index, output)
        )
        for index in set(wanted)
    ]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()
