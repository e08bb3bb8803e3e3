"""A model on its device that runs packed steps, attending through Kvant's pages."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from kvant.attention.base import StepCall
from kvant.attention.hook import ATTENTION_NAME
from kvant.attention.watch import check_all_were_reached, watch
from kvant.errors import NotServable, WayOut
from kvant.kv.checkpoint.facts import Side
from kvant.kv.spec import KVPlan
from kvant.models.cpu.info import refuse_host
from kvant.models.fused import FusedDecoder, fuse
from kvant.models.invariant.linear import TiledLinear
from kvant.models.invariant.mode import Paused, RowByRow
from kvant.models.quantization import Quantization, refuse_model

if TYPE_CHECKING:
    from kvant.models.cpu.decoder import CpuDecoder


class LoadedModel:
    """Weights on a device, and the forward over packed sequences.

    plan: what its layers store. scales: the checkpoint's scales that the plan uses, float32 [1] or
    [num_kv_heads] by (layer index, side), for `KVPool`. unused_tensors: names of weights in the
    files that nothing of the model uses (scales among them). batch_invariant: each row's result is,
    bit for bit, its own, with backends of the same promise. quantization: of the module's weights,
    which are gone afterwards. NotServable where that cannot be had.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        plan: KVPlan,
        scales: Mapping[tuple[int, Side], Tensor],
        device: torch.device,
        unused_tensors: tuple[str, ...],
        *,
        batch_invariant: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        self.plan = plan
        self.scales = scales
        self.device = device
        self.unused_tensors = unused_tensors
        self._module = module
        self.quantization = quantization
        self._fused = _decoder_for(module, plan, quantization)
        self._proved = False
        self.batch_invariant = batch_invariant
        self._row_by_row: RowByRow | None = None
        if batch_invariant:
            self._row_by_row = _make_invariant(module, self._fused, device)

    @property
    def generation(self) -> GenerationConfig:
        """transformers' generation_config.json, else what config.json says of generation."""
        found = self._module.generation_config
        assert isinstance(found, GenerationConfig)
        return found

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text; empty where neither generation_config.json nor config.json names one."""
        found = self.generation.eos_token_id
        if found is None:
            text = self._module.config.get_text_config(decoder=True)
            found = getattr(text, "eos_token_id", None)
        if found is None:
            return ()
        return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of parameters and buffers as they lie in memory now, tied ones once."""
        tensors = {id(t): t for t in (*self._module.parameters(), *self._module.buffers())}
        found = sum(t.numel() * t.element_size() for t in tensors.values())
        if self._fused is None or isinstance(self._fused, FusedDecoder):
            return found
        return found + self._fused.num_extra_bytes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""
        return self._module.dtype

    @property
    def compiled_seconds(self) -> float | None:
        """Spent in one call of compiled code a step, so far; None for models that do not run so."""
        if self._fused is None or isinstance(self._fused, FusedDecoder):
            return None
        return self._fused.compiled_seconds

    def forward(self, input_ids: Tensor, call: StepCall, logits_index: Tensor) -> Tensor:
        """Run one step and return logits [len(logits_index), vocab_size], float32 or wider.

        input_ids: [T] int64, the packed tokens of `call.step`. logits_index: [n] int64, positions
        in T. Writes the step's keys and values into the pool. Raises EngineFault at the first
        forward if a planned layer does not attend through the pool.
        """
        logits, _ = self.forward_with_hidden(input_ids, call, logits_index, ())
        return logits.to(widened(logits.dtype))

    @torch.no_grad()
    def forward_with_hidden(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`forward`, and what these decoder layers hand on: [T, hidden_size] each; all as computed."""
        if self._proved:
            return self._run(input_ids, call, logits_index, layers)
        watched, backends = watch(call)
        found = self._run(input_ids, watched, logits_index, layers)
        check_all_were_reached(call, backends, type(self._module).__name__)
        self._proved = True
        return found

    def refit(self, other: LoadedModel) -> None:
        """Take the numbers of weights and scales of a model of the same plan, which may lie elsewhere.

        NotServable, before anything is changed, where the tensors of both are not alike.
        """
        own, new = _tensors(self._module), _tensors(other._module)
        if _shapes(own) != _shapes(new) or self.scales.keys() != other.scales.keys():
            raise NotServable(
                "these weights do not fit into the model that runs",
                why="tensors have other names, shapes or dtypes",
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(new[name])
            for key, scale in self.scales.items():
                scale.copy_(other.scales[key])

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden_size], as the model's first layer gets them."""
        found: Tensor = self._module.get_input_embeddings()(input_ids)
        return found

    def score(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size], normed -> [n, vocab_size] by the model's head, without a soft cap.

        hidden may come in another dtype, from a drafter that computes in its own.
        """
        if self._fused is not None and not isinstance(self._fused, FusedDecoder):
            return self._fused.score(hidden.to(self.dtype))
        head = self._module.get_output_embeddings()  # type: ignore[no-untyped-call]
        assert head is not None, "a model that generates has a head"
        found: Tensor = head(hidden.to(self.dtype))
        return found

    @property
    def _decoder_layers(self) -> nn.ModuleList:
        found = self._module.get_decoder().layers  # type: ignore[no-untyped-call]
        assert isinstance(found, nn.ModuleList)
        return found

    def _run(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        mode = self._row_by_row
        if mode is None:
            return self._compute(input_ids, call, logits_index, layers)
        backends = {id(backend): Paused(backend, mode) for backend in call.backends}
        paused = tuple(backends[id(backend)] for backend in call.backends)
        with mode:
            return self._compute(
                input_ids, dataclasses.replace(call, backends=paused), logits_index, layers
            )

    def _compute(
        self, input_ids: Tensor, call: StepCall, logits_index: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self._fused is not None:
            logits, taken = self._fused.forward(input_ids, call, logits_index, layers)
        else:
            with _tap(self._decoder_layers, layers) as taps:
                out = self._module(
                    input_ids=input_ids[None],  # the packed tokens as a batch of one
                    position_ids=call.step.positions[None],
                    use_cache=False,
                    logits_to_keep=logits_index,
                    **{ATTENTION_NAME: call},
                )
            logits, taken = out.logits[0], tuple(taps[index] for index in layers)
        return logits, taken


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits that tokens are chosen by: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _tensors(module: PreTrainedModel) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _decoder_for(
    module: PreTrainedModel, plan: KVPlan, quantization: Quantization | None
) -> FusedDecoder | CpuDecoder | None:
    """Kvant's own decoder, on CPUs as compiled code where there is some; None for other models."""
    fused = fuse(module, plan)
    if fused is None:
        reason: str | None = f"Kvant's own decoder does not run this {type(module).__name__}"
    elif fused.embedding.device.type != "cpu":
        reason = "its kernels run on CPUs"
    else:
        reason = refuse_host()
    if fused is not None and reason is None:
        from kvant.models.cpu.decoder import CpuDecoder, refuse

        reason = refuse(fused)
        if reason is None:
            made = CpuDecoder(fused, quantization)
            if quantization is not None:
                _drop_products(module)
            return made
    if quantization is not None:
        assert reason is not None
        raise refuse_model(quantization, reason)
    return fused


def _drop_products(module: PreTrainedModel) -> None:
    """Give back the memory of weights that were packed; a tied head remains as the embedding."""
    embedding: Any = module.get_input_embeddings()
    for part in module.modules():
        if type(part) is nn.Linear and part.weight is not embedding.weight:
            part.weight.data = part.weight.data.new_empty(0)
            if part.bias is not None:
                part.bias.data = part.bias.data.new_empty(0)


def _make_invariant(
    module: PreTrainedModel, fused: FusedDecoder | CpuDecoder | None, device: torch.device
) -> RowByRow | None:
    """Give a model products in fixed tiles; the mode in which its modules must run, if they do."""
    if fused is not None and not isinstance(fused, FusedDecoder):
        return None  # compiled code is so as it is
    linear = TiledLinear()
    for part in module.modules():
        if type(part) is nn.Linear:
            linear.prove(part.weight, part.bias)
    if fused is not None:
        fused.make_invariant(linear)
        return None
    name = type(module).__name__
    if device.type != "cpu":
        raise NotServable(
            f"--batch-invariant cannot be promised for {name} on a GPU",
            why="there it is kept by Kvant's own decoder, which runs plain dense models only",
            ways_out=(
                WayOut("run without --batch-invariant"),
                WayOut("run on the CPU", ("--device", "cpu")),
            ),
        )
    return RowByRow(linear, name)


@contextmanager
def _tap(layers: nn.ModuleList, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Inside, the wanted decoder layers' outputs arrive in the dict, without the batch of one.

    transformers' own `output_hidden_states=[..]` means other layers in 5.17 than in 5.23, and
    gives the last layer's output after the final norm. What other threads run meanwhile is theirs.
    """
    taps: dict[int, Tensor] = {}
    own = threading.get_ident()

    def keep(index: int, output: object) -> None:
        if threading.get_ident() != own:  # hooks are the layers', whoever runs them
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
