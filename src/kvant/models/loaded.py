"""A model on its device that runs packed steps and attends through Kvant's pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from kvant.attention.base import StepCall
from kvant.attention.watch import check_all_were_reached, watch
from kvant.errors import NotServable, WayOut
from kvant.kv.format import Side
from kvant.kv.spec import KVPlan
from kvant.models.forward import Forward
from kvant.models.forward_info import ForwardChoice
from kvant.models.quantization import Quantization
from kvant.models.sharding.divide import Group
from kvant.weights.linear import NarrowEmbedding


class LoadedModel:
    """Weights on a device, and the forward over packed sequences.

    plan: the layers' formats. scales: the checkpoint's scales that the plan uses, float32 [1] or
    [num_kv_heads] by (layer index, side), for `KVPool`. unused_tensors: names of tensors in the files
    that the module does not use (such as scales). choice: the plan's forward and its options. With
    batch_invariant, no row's bits depend on other rows, if the backends promise this too. With quantization,
    the module's own weights are freed. group: the ranks that share the model, None for an undivided one;
    plan, scales and module are this rank's.
    read_outside: reads the scales, and the matrices for rounding keys, that another plan uses.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        plan: KVPlan,
        scales: Mapping[tuple[int, Side], Tensor],
        device: torch.device,
        unused_tensors: tuple[str, ...],
        choice: ForwardChoice,
        group: Group | None = None,
        read_outside: Callable[[KVPlan], Mapping[tuple[int, Side], Tensor]] | None = None,
    ) -> None:
        self._read_outside = read_outside
        self.plan = plan
        self.scales = scales
        self.device = device
        self.unused_tensors = unused_tensors
        self._module = module
        self.choice = choice
        self.group = group
        self._proved = False
        assert choice.info is not None, "the plan says that nothing runs this model"
        make = import_module(choice.info.module).make
        self._forward: Forward = (
            make(module, plan, choice) if group is None else make(module, plan, choice, group)
        )

    def scales_for(self, plan: KVPlan) -> Mapping[tuple[int, Side], Tensor]:
        """Returns `scales` for another plan of this model, for which it reads the checkpoint again."""
        if plan is self.plan or self._read_outside is None:
            return self.scales
        return self._read_outside(plan)

    @property
    def batch_invariant(self) -> bool:
        return self.choice.batch_invariant

    @property
    def quantization(self) -> Quantization | None:
        return self.choice.quantization

    @property
    def generation(self) -> GenerationConfig:
        """The ends of a text in generation_config.json, else the generation options in config.json."""
        found = self._module.generation_config
        assert isinstance(found, GenerationConfig)
        return found

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text; empty if neither generation_config.json nor config.json names one."""
        found = self.generation.eos_token_id
        if found is None:
            text = self._module.config.get_text_config(decoder=True)
            found = getattr(text, "eos_token_id", None)
        if found is None:
            return ()
        return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of parameters, buffers and the forward's own tensors, tied tensors once."""
        tensors = {id(t): t for t in (*self._module.parameters(), *self._module.buffers())}
        found = sum(t.numel() * t.element_size() for t in tensors.values())
        return found + self._forward.extra_bytes

    def weight_bytes_of_step(self, num_tokens: int) -> int:
        """Returns the bytes of weights that a step of `num_tokens` reads, each weight once.

        Tables of embeddings are left out, unless the head multiplies by them. With E experts and k for each
        token, E * (1 - (1 - k / E) ** num_tokens) experts are read: the expected number if all are equally
        likely.
        """
        tables = {
            id(module.weight)
            for module in self._module.modules()
            if isinstance(module, nn.Embedding)
        }
        head = self._module.get_output_embeddings()  # type: ignore[no-untyped-call]
        for module in self._module.modules():
            if isinstance(module, NarrowEmbedding) and module.linear is not head:
                tables |= {id(tensor) for tensor in module.parameters()}
        tables.discard(id(getattr(head, "weight", None)))
        tensors = {id(t): t for t in (*self._module.parameters(), *self._module.buffers())}
        read = sum(tensor.nbytes for key, tensor in tensors.items() if key not in tables)
        unread = sum(one.unread(num_tokens) for one in self._forward.expert_bytes)
        return round(self._forward.own_weight_bytes + read - unread)

    @property
    def dtype(self) -> torch.dtype:
        """The planned compute dtype. A module whose weights were freed does not have it."""
        found: torch.dtype = getattr(torch, self.plan.compute_dtype.value)
        return found

    @property
    def hidden_size(self) -> int:
        """Width of the hidden state between two layers."""
        return int(self._module.config.get_text_config(decoder=True).hidden_size)

    @property
    def compiled_seconds(self) -> float | None:
        """Seconds spent in compiled code so far; None for forwards without one compiled call per step."""
        return self._forward.compiled_seconds

    def forward(self, input_ids: Tensor, call: StepCall, logits_index: Tensor) -> Tensor:
        """Runs one step and returns logits [len(logits_index), vocab_size], float32 or wider.

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
        """Runs a step like `forward`. Returns unwidened logits, and the layers' outputs [T, hidden_size]."""
        if self._proved:
            return self._forward.run(input_ids, call, logits_index, layers)
        watched, backends = watch(call)
        found = self._forward.run(input_ids, watched, logits_index, layers)
        check_all_were_reached(call, backends, type(self._module).__name__)
        self._proved = True
        return found

    @torch.enable_grad()
    def forward_for_gradients(self, input_ids: Tensor, call: StepCall) -> Tensor:
        """Runs a step like `forward`, for a backward pass to what backends get and return.

        Returns unwidened logits [T, vocab_size] after every token. Only transformers' modules can do this.
        """
        index = torch.arange(len(input_ids), device=input_ids.device)
        return self._forward.run(input_ids, call, index, ())[0]

    @property
    def last(self) -> tuple[int, nn.Module]:
        """The last decoder layer's index, and the norm between its output and the head.

        Raises NotServable if there are other modules between them.
        """
        decoder = self._module.get_decoder()  # type: ignore[no-untyped-call]
        found = next((getattr(decoder, one) for one in _FINAL_NORMS if hasattr(decoder, one)), None)
        if not isinstance(found, nn.Module) or hasattr(decoder, "altup_projections"):
            raise NotServable(
                f"embeddings of {type(self._module).__name__} are not offered",
                why="its last layer's output is not what its final norm reads",
                ways_out=(WayOut("generate text with it", ("--task", "generate")),),
            )
        return len(decoder.layers) - 1, found

    def refit(self, other: LoadedModel) -> None:
        """Copies weights and scales from a model of the same plan, which may be on another device.

        Raises NotServable, before any change, if the tensors of both differ in name, shape or dtype.
        """
        if self.choice.stored is not None and self.choice.rounds_itself:
            self._module, self._forward, self.scales = other._module, other._forward, other.scales
            return
        own, new = _tensors(self._module), _tensors(other._module)
        if _shapes(own) != _shapes(new) or self.scales.keys() != other.scales.keys():
            raise NotServable(
                "these weights do not fit into the model that runs",
                why="tensors have other names, shapes or dtypes",
            )
        with torch.no_grad():
            if self.choice.rounds_itself:  # its forward has weights of other forms
                self._module, self._forward = other._module, other._forward
            else:
                for name, tensor in own.items():
                    tensor.copy_(new[name])
            for key, scale in self.scales.items():
                scale.copy_(other.scales[key])

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeds tokens: [T] int64 -> [T, hidden_size], the input of the model's first layer."""
        found: Tensor = self._module.get_input_embeddings()(input_ids)
        return found

    def score(self, hidden: Tensor) -> Tensor:
        """Applies the head: [n, hidden_size], normed -> [n, vocab_size], without a soft cap.

        hidden may have another dtype, from a drafter.
        """
        return self._forward.score(hidden.to(self.dtype))


_FINAL_NORMS = (
    "norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm"
)  # fmt: skip


def widened(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of logits for choosing tokens: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _tensors(module: PreTrainedModel) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
