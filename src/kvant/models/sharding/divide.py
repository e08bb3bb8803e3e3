"""Divides a transformers module: shrinks parameters, reads a rank's slices of files, adds sums over ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from kvant.errors import EngineFault
from kvant.kv.checkpoint.safetensors_header import find_weight_files
from kvant.kv.format import Side
from kvant.kv.spec import KVPlan
from kvant.models.recurrent.mixers import MIXERS
from kvant.models.sharding.cuts import SUMMED, Cut, CutOfWhole, Cuts, Rule
from kvant.models.sharding.narrow import CutOf, cut_part
from kvant.models.sharding.shard import Shard
from kvant.models.stored import Stored
from kvant.weights.linear import NarrowLinear

_OUTPUTS = ("o_proj", "out_proj", "dense")
"""Names of the product after attention in transformers' modules."""


class Group(Protocol):
    """A forward's operations with other ranks. Every rank must call them in the same order."""

    @property
    def shard(self) -> Shard: ...

    def alone(self) -> AbstractContextManager[None]:
        """In this context nothing is sent; sums and gathers return wrong values of the right shape."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x [..], in float32 in the order of ranks: equal bits on all ranks."""
        ...

    def sum_add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Runs `sum`, an addition to `residual` in place, and an RMS norm in one launch; None if it cannot.

        x, residual: [n, width]. Returns the normed rows, and `residual`.
        """
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Concatenates all ranks' x [.., n] in the order of ranks: [.., size * n]."""
        ...


def cut_of(tensor: Tensor, cut: Cut) -> Tensor:
    """Returns a copy of a rank's parts of a whole tensor [..]: [..], shorter in one dimension."""
    parts = [tensor.narrow(cut.dim, start, end - start) for start, end in cut.ranges]
    return torch.cat(parts, cut.dim)


def cut_scales(
    scales: Mapping[tuple[int, Side], Sequence[float]], plan: KVPlan, shard: Shard
) -> dict[tuple[int, Side], Sequence[float]]:
    """Returns this rank's part of scales per KV head, and scales per layer whole. plan: the whole model's."""
    found = {}
    for (layer, side), values in scales.items():
        first, last = shard.kv_heads(plan.layers[layer].geometry.num_kv_heads)
        found[layer, side] = values[first:last] if len(values) > 1 else values
    return found


def gather_logits(group: Group, logits: Tensor, vocab_size: int) -> Tensor:
    """Gathers logits of this rank's rows of the vocabulary [.., n] to those of all rows [.., vocab_size]."""
    most = -(-vocab_size // group.shard.size)
    if logits.shape[-1] < most:
        logits = nn.functional.pad(logits, (0, most - logits.shape[-1]))
    return group.gather(logits)[..., :vocab_size]


class Divided:
    """Converts a module to one rank's part. stored: how narrow weights of the files run.

    `resize` shrinks parameters before values are loaded. After that, `finish` divides parameters that could
    not be loaded in parts, and adds the sums over ranks.
    """

    def __init__(self, cuts: Cuts, group: Group, stored: Stored | None = None) -> None:
        self._cuts, self._group, self._stored = cuts, group, stored
        self.cut: dict[str, CutOfWhole] = {}
        """Parameters that `resize` cut: path -> cut and whole shape."""

    def resize(self, module: nn.Module) -> None:
        """Replaces divided parameters by empty ones of this rank's size, on the same device.

        Biases that must be added once remain on rank 0 only. A tied head stays whole.
        """
        first = self._cuts.shard.is_first
        tied = is_tied(module)
        for path, owner, name, parameter in list(_parameters(module)):
            rule = self._cuts.rule_of(path)
            if rule is Rule.ONCE and not first:
                owner.register_parameter(name, None)
            cut = self._cuts.of(path, parameter.shape)
            if cut is None or (cut.rule is Rule.VOCABULARY and tied):
                continue
            self.cut[path] = cut, tuple(parameter.shape)
            shape = list(parameter.shape)
            shape[cut.dim] = cut.length
            if parameter.ndim == 1:  # its initial value may be the final one
                held = cut_of(parameter.data, cut)
            else:
                held = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            setattr(owner, name, nn.Parameter(held, requires_grad=False))
            if isinstance(owner, nn.Linear):
                owner.out_features, owner.in_features = owner.weight.shape
            elif isinstance(owner, nn.Conv1d):  # depthwise: one filter per channel
                owner.in_channels = owner.out_channels = owner.groups = len(owner.weight)

    def read(self, directory: Path, factory: Any, options: Mapping[str, Any]) -> Any:
        """Loads this rank's part by `from_pretrained` with these options, and returns its result.

        factory: an Auto class. The module has the class of the whole model.
        """
        config = options["config"]
        kind = factory._model_mapping[type(config)]
        if kind.config_class is config.sub_configs.get("text_config"):  # as Auto classes do
            options = {**options, "config": config.get_text_config(decoder=True)}
        divided = self

        class Part(kind):  # type: ignore[misc,valid-type]
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **named)
                divided.resize(self)

        Part.__name__, Part.__qualname__, Part.__module__ = (
            kind.__name__, kind.__qualname__, kind.__module__,
        )  # fmt: skip
        tied = _ties(options["config"])

        def cut_of_file(name: str, shape: tuple[int, ...]) -> Cut | None:
            layer, _, short = name.rpartition(".")
            scheme, of = None, None
            if self._stored is not None and short != "bias":
                scheme = self._stored.scheme(layer)
                of = self.cut.get(f"{self._stored.names.of_module(layer)}.weight")
            if scheme is not None and of is not None and len(of[1]) == 2:  # no norm over all heads
                return cut_part(scheme, short, shape, (of[1][0], of[1][1]), of[0])
            cut = self._cuts.of(name, shape)
            return None if cut is not None and cut.rule is Rule.VOCABULARY and tied else cut

        with RankFiles(directory, cut_of_file) as files:
            found = Part.from_pretrained(None, state_dict=files.tensors, **options)
        module = found[0]
        module.__class__ = kind
        if "generation_config" in options:
            module.generation_config = options["generation_config"]
        return found

    def make_numbers(self, module: Any, names: Sequence[str], generator: torch.Generator) -> None:
        """Fills the parameters `names`, in this order, with this rank's parts of whole random weights."""
        for name in names:
            found = self.cut.get(name)
            at, _, last = name.rpartition(".")
            parameter = getattr(module.get_submodule(at), last)
            if parameter is None or (parameter.ndim == 1 and found is None):
                continue
            shape = parameter.shape if found is None else found[1]
            if len(shape) == 1:
                continue
            whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            whole.normal_(0.0, 0.02, generator=generator)
            parameter.data.copy_(whole if found is None else cut_of(whole, found[0]))

    def finish(self, module: nn.Module) -> None:
        """Makes the module add partial sums, norm over the heads of all ranks, and gather logits."""
        group, shard = self._group, self._cuts.shard
        for path, owner, _, parameter in list(_parameters(module)):
            rule = self._cuts.rule_of(path)
            if rule is Rule.EXPERT_ONCE and not shard.is_first:
                parameter.data.zero_()
            if rule in SUMMED and isinstance(owner, (nn.Linear, NarrowLinear)):
                owner.register_forward_hook(lambda _module, _inputs, out: group.sum(out))
            if rule is Rule.MIXER_INPUTS:  # forwards that call only the mixer do the sum themselves
                mixer = module.get_submodule(path.rsplit(".", 2)[0])
                mixer.register_forward_hook(lambda _module, _inputs, out: group.sum(out))
            if rule is Rule.GATED_NORM:
                at, _, last = path.removesuffix(".weight").rpartition(".")
                setattr(module.get_submodule(at), last, _gated_norm_of_ranks(owner, group))
            if rule in (Rule.HEADS_OF_A_NORM, Rule.KV_HEADS_OF_A_NORM):
                at, _, last = path.removesuffix(".weight").rpartition(".")
                repeats = self._cuts.kv_repeats(path) if rule is Rule.KV_HEADS_OF_A_NORM else 1
                setattr(module.get_submodule(at), last, _NormOfAllHeads(owner, group, repeats))
        for path, part in module.named_modules():
            if path.endswith(".experts") and self._cuts.rule_of(f"{path}.down_proj"):
                part.register_forward_hook(lambda _module, _inputs, out: group.sum(out))
            if type(part).__name__ in MIXERS:
                self._adjust_mixer(path, part)
            elif hasattr(part, "layer_idx") and any(hasattr(part, name) for name in _OUTPUTS):
                self._adjust(part)
        self._divide_head(module)

    def _adjust(self, attention: Any) -> None:
        """Sets an attention module's number of heads, also in its config, which some modules read."""
        size = self._cuts.shard.size
        config = copy.copy(attention.config)
        q = config.num_attention_heads
        kv = getattr(config, "num_key_value_heads", None) or q
        few = {
            "num_attention_heads": q // size,
            "num_heads": q // size,
            "num_key_value_heads": max(1, kv // size),
            "num_key_value_groups": (q // size) // max(1, kv // size),
        }
        for name, count in few.items():
            if hasattr(attention, name):
                setattr(attention, name, count)
        # Bypasses the class's setattr, which would check the fields against each other.
        config.num_attention_heads = q // size
        if hasattr(config, "num_key_value_heads"):
            config.num_key_value_heads = max(1, kv // size)
        attention.config = config

    def _adjust_mixer(self, path: str, mixer: Any) -> None:
        """Sets the number of heads of a module with recurrent states."""
        size = self._cuts.shard.size
        for name in ("num_heads", "num_v_heads", "intermediate_size", "value_dim", "qkv_dim"):
            if hasattr(mixer, name):
                setattr(mixer, name, getattr(mixer, name) // size)
        for name in ("num_k_heads", "n_groups"):
            if hasattr(mixer, name):
                setattr(mixer, name, max(1, getattr(mixer, name) // size))
        if hasattr(mixer, "key_dim"):
            mixer.key_dim = mixer.num_k_heads * mixer.head_k_dim
        if hasattr(mixer, "conv_dim"):
            mixer.conv_dim = mixer.conv1d.weight.shape[0]
        if hasattr(mixer, "mup_vector"):  # a factor for each output of the projection
            cut, _ = self.cut[f"{path}.in_proj.weight"]
            mixer.mup_vector = cut_of(mixer.mup_vector, replace(cut, dim=-1))

    def _divide_head(self, module: Any) -> None:
        head = module.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise EngineFault(f"{type(module).__name__} has a head that is not divided")
        vocab_size = module.config.get_text_config(decoder=True).vocab_size
        if is_tied(module):
            cut = self._cuts.of("lm_head.weight", head.weight.shape)
            assert cut is not None
            ((start, end),) = cut.ranges
            head.weight = nn.Parameter(head.weight[start:end], requires_grad=False)
        group = self._group
        head.register_forward_hook(
            lambda _module, _inputs, out: gather_logits(group, out, vocab_size)
        )


class _NormOfAllHeads(nn.Module):
    """An RMS norm over values on all ranks. repeats: number of ranks that have equal values."""

    def __init__(self, norm: Any, group: Group, repeats: int) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon
        self._group = group
        self._width = len(norm.weight) * group.shard.size // repeats
        self._repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        """Norms x [.., this rank's values]; returns the shape and dtype of x."""
        wide = x.to(torch.float32)
        squares = self._group.sum(wide.pow(2).sum(-1, keepdim=True)) / self._repeats
        wide = wide * torch.rsqrt(squares / self._width + self.variance_epsilon)
        found: Tensor = (self.weight * wide).to(x.dtype)
        return found


def _gated_norm_of_ranks(norm: Any, group: Group) -> nn.Module:
    """Returns a gated norm of this rank's values that replaces `norm`, whose groups may span ranks."""
    size = group.shard.size
    width = len(norm.weight) * size
    groups = getattr(norm, "n_groups", None) or width // norm.group_size
    if groups % size == 0:
        if hasattr(norm, "n_groups"):
            norm.n_groups //= size
        found: nn.Module = norm
        return found
    assert size % groups == 0, "heads and their groups divide alike"
    return _GatedNormOfRanks(norm, group, width // groups, size // groups)


class _GatedNormOfRanks(nn.Module):
    """A gated RMS norm over `width` values, which are divided among `sharing` consecutive ranks."""

    def __init__(self, norm: Any, group: Group, width: int, sharing: int) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon
        self._gates_first = not getattr(norm, "norm_before_gate", False)
        self._rounds_first = not hasattr(norm, "norm_before_gate")
        self._group, self._width, self._sharing = group, width, sharing

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norms x and applies gate, both [.., this rank's values]; returns the shape and dtype of x."""
        factor = nn.functional.silu(gate.to(torch.float32))
        wide = x.to(torch.float32)
        if self._gates_first:
            wide = wide * factor
        squares = self._group.gather(wide.pow(2).sum(-1, keepdim=True))
        first = self._group.shard.rank // self._sharing * self._sharing
        mean = squares[..., first : first + self._sharing].sum(-1, keepdim=True) / self._width
        wide = wide * torch.rsqrt(mean + self.variance_epsilon)
        found: Tensor = self.weight * (wide.to(x.dtype) if self._rounds_first else wide)
        if not self._gates_first:
            found = found * factor
        return found.to(x.dtype)


def is_tied(module: Any) -> bool:
    """Returns whether the head's weight is the embedding's."""
    return _ties(module.config)


def _ties(config: Any) -> bool:
    configs = (config, config.get_text_config(decoder=True))
    return any(getattr(one, "tie_word_embeddings", False) for one in configs)


class RankFiles:
    """A mapping of names to lazy tensors, which read this rank's parts from a model's safetensors files."""

    def __init__(self, directory: Path, cut_of_file: CutOf) -> None:
        self._open = ExitStack()
        self.tensors: dict[str, _Part] = {}
        for file in find_weight_files(directory).paths:
            opened = self._open.enter_context(safe_open(file, framework="pt"))
            for name in opened.keys():  # noqa: SIM118  # it cannot be iterated over
                self.tensors[name] = _Part(name, opened.get_slice(name), cut_of_file)

    def __enter__(self) -> RankFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()


class _Part:
    """A rank's part of a tensor in a file, which may be all of it. `part[...]` reads it.

    The cut is only computed when it is needed, since for narrow layers it depends on the module.
    """

    def __init__(self, name: str, source: Any, cut_of_file: CutOf) -> None:
        self._source = source
        self._ask = partial(cut_of_file, name)

    @cached_property
    def _cut(self) -> Cut | None:
        return self._ask(tuple(self._source.get_shape()))

    def __getitem__(self, key: object) -> Tensor:
        assert key is Ellipsis, "transformers reads whole tensors"
        cut = self._cut
        if cut is None:
            found: Tensor = self._source[...]
            return found
        before = len(self._source.get_shape()) + cut.dim
        at = (slice(None),) * before
        parts = [self._source[(*at, slice(start, end))] for start, end in cut.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)

    def get_shape(self) -> list[int]:
        shape: list[int] = list(self._source.get_shape())
        if self._cut is not None:
            shape[self._cut.dim] = self._cut.length
        return shape

    def get_dtype(self) -> str:
        found: str = self._source.get_dtype()
        return found


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yields (path, owner, name, parameter). Tied parameters appear under each of their paths."""
    for at, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield (f"{at}.{name}" if at else name), owner, name, parameter
