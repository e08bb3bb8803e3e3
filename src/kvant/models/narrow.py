"""Makes narrow weights while transformers loads a model: rounds them, or keeps those of the checkpoint.

It is a quantiser of transformers, named "kvant". A quantiser replaces modules before weights arrive, and can
convert each arriving weight to other tensors. So only one matrix at a time is wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvant.errors import BadCheckpoint, KvantError, NotServable, WayOut
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG
from kvant.models.file_names import PRODUCTS
from kvant.models.fused.narrow_experts import NarrowExperts, has_stacks, is_experts
from kvant.models.quantization import Quantization, format_of
from kvant.models.sharding.cuts import Cut, CutOfWhole
from kvant.models.sharding.divide import is_tied
from kvant.models.sharding.narrow import cut_part
from kvant.models.stored import ONE_FORMAT, Stored
from kvant.models.stored_experts import StoredExperts, TensorFiles
from kvant.models.weights import WIDE_BYTES
from kvant.weights.codecs import decode, encode, encode_in_parts, encode_stack
from kvant.weights.dialects import check_scales, read, read_order
from kvant.weights.format import FP8_CHANNEL, FP8_TENSOR, WHOLE, Dialect, Scheme, WeightFormat
from kvant.weights.linear import NarrowEmbedding, NarrowLinear, named_tensors
from kvant.weights.parts import Role, parts_of

_METHOD = "kvant"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8,
    "U8": torch.uint8,
}  # fmt: skip


_MADE_UP_SCALE = 1 / 32
"""The scale of activations for made-up weights. Outputs of norms are at most 448 times as large."""

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of modules that choose or weigh experts. Their weights are not rounded."""


def chosen_layers(
    model: PreTrainedModel, asked: Quantization, *, head: bool = True
) -> dict[str, WeightFormat]:
    """Returns the formats of linear layers to round, by name: in decoder layers, except routers.

    head: the head too. Raises NotServable if the decoder layers have no linear layer.
    """
    inside = {
        name: format_of(asked, part.in_features)
        for name, part in _inside(model)
        if _holds_numbers(part) and not _ROUTERS.intersection(name.split("."))
    }
    if not inside:
        raise NotServable(
            f"--quantization {asked.value} is not available for {type(model).__name__}",
            why="its layers have no linear layers, but other classes with matrices",
            ways_out=(WayOut("leave out --quantization"),),
        )
    own = _head_of(model)
    if not head or own is None:
        return inside
    return {own: format_of(asked, _linear(model, own).in_features, is_head=True), **inside}


def _holds_numbers(part: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether a module is a linear layer with numbers.

    Those of 0 shared experts have none, and stay as they are.
    """
    return type(part) is nn.Linear and part.weight.numel() > 0


def _head_of(model: PreTrainedModel) -> str | None:
    """Returns the name of the model's head, if it is a linear layer."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = (name for name, part in model.named_modules() if part is head)
    return next(names) if type(head) is nn.Linear else None


def chosen_experts(
    model: PreTrainedModel, asked: Quantization
) -> dict[str, tuple[WeightFormat, WeightFormat]]:
    """Returns the formats of both products of each module of experts, by name."""
    found = {}
    for name, part in _inside(model):
        if is_experts(part):
            first, second = (columns for _, _, columns in NarrowExperts(part, None).shapes.values())
            found[name] = format_of(asked, first), format_of(asked, second)
    return found


def _inside(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields names in the model, and modules, of the decoder's layers."""
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    layers = getattr(decoder, "layers", None)
    if layers is None:  # GPT-2's are named h
        lists = [part for part in decoder.children() if isinstance(part, nn.ModuleList)]
        layers = max(lists, key=len)
    inside = {id(part) for part in layers.modules()}
    for name, part in model.named_modules():
        if id(part) in inside:
            yield name, part


def make_narrow(
    model: PreTrainedModel,
    asked: Quantization | None,
    stored: Stored | None,
    numbers: Callable[[Tensor], Tensor],
    *,
    head: bool,
) -> None:
    """Replaces layers by narrow ones with made-up weights, one matrix after another.

    numbers: makes wide values [..] for a parameter, which may be on the meta device. head: with the head.
    """
    linear: dict[str, WeightFormat] = {}
    experts: dict[str, tuple[WeightFormat, WeightFormat]] = {}
    if asked is not None:
        linear, experts = chosen_layers(model, asked, head=head), chosen_experts(model, asked)
    if stored is not None:
        linear, experts = _stored_formats(model, stored)
    for name, fmt in linear.items():
        scheme = None if stored is None else stored.scheme(name)
        model.set_submodule(name, _made_up_linear(_linear(model, name), fmt, scheme, numbers))
    for name, formats in experts.items():
        model.set_submodule(name, _made_up_experts(model.get_submodule(name), formats, numbers))


def _made_up_linear(
    old: nn.Linear, fmt: WeightFormat, scheme: Scheme | None, numbers: Callable[[Tensor], Tensor]
) -> NarrowLinear:
    """Returns a narrow layer with made-up weights. scheme: the checkpoint's; None if weights are rounded."""
    wide = numbers(old.weight)
    whole = fmt.rows == WHOLE or fmt.global_scale
    made = (encode if whole else encode_in_parts)(wide, fmt)
    scale = None
    if scheme is not None and scheme.rounds_inputs:
        scale = wide.new_full((1,), _MADE_UP_SCALE)
    if scheme is not None and scheme.reordered:
        order = torch.arange(old.in_features, dtype=torch.int32, device=wide.device)
        made = replace(made, order=order.flip(0))
    new = _awaiting(old, fmt)
    new.put(made, None if old.bias is None else wide.new_zeros(old.bias.shape), scale)
    return new


def _made_up_experts(
    old: nn.Module,
    formats: tuple[WeightFormat, WeightFormat],
    numbers: Callable[[Tensor], Tensor],
) -> NarrowExperts:
    """Returns narrow experts with made-up weights. formats: of both products."""
    new = NarrowExperts(old, None)
    for product, fmt in zip(PRODUCTS, formats, strict=True):
        wide = numbers(getattr(old, product))
        new.put(product, encode_stack(wide.transpose(1, 2) if new.clamped else wide, fmt))
    return new


def _stored_formats(
    model: PreTrainedModel, stored: Stored
) -> tuple[dict[str, WeightFormat], dict[str, tuple[WeightFormat, WeightFormat]]]:
    """Returns the checkpoint's formats of linear layers, and of modules of experts, by name."""
    linear, experts = {}, {}
    for name, part in model.named_modules():
        if _holds_numbers(part):
            scheme = stored.scheme(name)
            if scheme is not None:
                linear[name] = scheme.format
        elif is_experts(part):
            schemes = [
                stored.scheme(stored.names.matrix(name, 0, one))
                for one in (stored.names.gate, stored.names.down)
            ]
            if schemes[0] is not None and schemes[1] is not None:
                experts[name] = _per_row(schemes[0].format), _per_row(schemes[1].format)
    return linear, experts


def _per_row(fmt: WeightFormat) -> WeightFormat:
    """Returns a format for joined weights, in which a scale per matrix becomes one per output."""
    return FP8_CHANNEL if fmt == FP8_TENSOR else fmt


class StoredLinear(nn.Module):
    """Replaces a linear layer while its tensors are loaded in the checkpoint's format.

    Its parameters have the tensors' names after the layer's name. tensors: safetensors' dtypes and shapes, by
    such names.
    """

    def __init__(
        self, scheme: Scheme, old: nn.Linear, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        super().__init__()
        self.scheme, self.out_features, self.in_features = scheme, old.out_features, old.in_features
        for name, (dtype, shape) in tensors.items():
            empty = torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bias = None
        if old.bias is not None:
            self.bias = nn.Parameter(torch.empty_like(old.bias, device="meta"), requires_grad=False)

    def narrow(self, name: str) -> NarrowLinear:
        """Returns the finished layer `name`, after all tensors were loaded."""
        tensors = dict(self.named_parameters())
        bias, scale = tensors.pop("bias", None), tensors.pop(self.scheme.input_scale, None)
        made = read(name, self.scheme, self.out_features, self.in_features, tensors)
        new = NarrowLinear(made.format, *made.shape, None if bias is None else bias.dtype)
        new.put(made, None if bias is None else bias.data, scale)
        return new


class StoredEmbedding(StoredLinear):
    """Replaces an embedding [rows, columns] in the same way. A tied head shares its tensor."""

    def __init__(
        self,
        scheme: Scheme,
        old: nn.Embedding,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    ) -> None:
        like = nn.Linear(old.embedding_dim, old.num_embeddings, bias=False, device="meta")
        super().__init__(scheme, like, tensors)


class NarrowConfig(QuantizationConfigMixin):
    """The argument `quantization_config` with which `from_pretrained` makes or keeps narrow weights.

    asked: how to round arriving weights. stored: how the files in `path` store narrow weights to keep.
    widened: decode them to this dtype. cut: parameters of which this rank has a part, with their whole shapes
    (`Divided.cut`). fault: the error of a weight, since transformers raises another exception instead.
    """

    def __init__(
        self,
        path: Path,
        *,
        asked: Quantization | None = None,
        stored: Stored | None = None,
        widened: torch.dtype | None = None,
        cut: Mapping[str, CutOfWhole] = MappingProxyType({}),
    ) -> None:
        _register()
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.fault: KvantError | None = None
        self._path, self._asked, self._stored, self._widened = path, asked, stored, widened
        self._cut = cut
        self._shapes: dict[str, torch.Size] = {}
        """Shapes that loaded tensors must have, by name."""
        self._experts: dict[str, StoredExperts] = {}
        """Where the tensors of narrow experts are, by their module's name."""
        self._wide: dict[str, nn.Module] = {}
        """transformers' modules for experts that will be decoded, by name."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NarrowConfig:
        """Returns itself: transformers copies configs, but this object must collect the results of a load."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": _METHOD}

    def prepare(self, model: PreTrainedModel) -> None:
        """Replaces layers of a model before its weights are loaded. Stores an error in `fault` too."""
        try:
            if self._asked is not None:
                head = not self._cut and not is_tied(model)
                for name, fmt in chosen_layers(model, self._asked, head=head).items():
                    model.set_submodule(name, _awaiting(_linear(model, name), fmt))
                for name, formats in chosen_experts(model, self._asked).items():
                    model.set_submodule(name, NarrowExperts(model.get_submodule(name), formats))
            if self._stored is not None:
                before = dict(model.named_modules())
                self._experts = await_stored(
                    model, self._path, self._stored, self._cut, widened=self._widened is not None
                )
                if self._widened is not None:
                    self._wide = {name: before[name] for name in self._experts}
        except KvantError as fault:
            self.fault = fault
            raise
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if isinstance(model.get_input_embeddings(), StoredEmbedding) and type(head) is nn.Linear:
            # A tied head will share the embedding's bytes.
            name = next(name for name, part in model.named_modules() if part is head)
            self._shapes.pop(f"{name}.weight", None)

    def finish(self, model: PreTrainedModel) -> None:
        """Checks the loaded tensors, and replaces the temporary layers by narrow ones.

        Raises BadCheckpoint if a tensor has another shape than its module, which transformers does not check.
        """
        quantizer: Any = model.hf_quantizer
        quantizer.remove_quantization_config(model)
        self._check_shapes(model)
        self._finish_layers(model)
        if self._asked is not None and not self._cut and is_tied(model):
            _round_tied_head(model, self._asked)
        self._read_experts(model)

    def _check_shapes(self, model: PreTrainedModel) -> None:
        for name, tensor in model.state_dict().items():
            expected = self._shapes.get(name)
            if expected is not None and tensor.shape != expected:
                raise BadCheckpoint(
                    f"{self._path}: {name} has the shape {tuple(tensor.shape)}",
                    why=f"the model needs {tuple(expected)}",
                )

    def _finish_layers(self, model: PreTrainedModel) -> None:
        """Replaces temporary layers by narrow ones, or by decoded ones if the weights are widened."""
        table: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        tied = isinstance(table, StoredEmbedding) and head.weight is table.weight
        for name, part in list(model.named_modules()):
            if not isinstance(part, StoredLinear):
                continue
            narrow = part.narrow(name)
            new: nn.Module = narrow
            if self._widened is not None:
                new = _decoded(narrow, self._widened)
            if part is table:
                new = self._as_embedding(model, new, head if tied else None)
            model.set_submodule(name, new)

    def _read_experts(self, model: PreTrainedModel) -> None:
        """Reads the weights of narrow experts, or decodes them into transformers' modules."""
        for name, experts in self._experts.items():
            made = model.get_submodule(name)
            assert isinstance(made, NarrowExperts)
            if self._widened is None:
                experts.read_into(made, model.device)
                continue
            experts.decode_into(self._wide[name], made.shapes, model.device, self._widened)
            model.set_submodule(name, self._wide[name])

    @property
    def read_apart(self) -> tuple[str, ...]:
        """Prefixes of names of tensors that Kvant reads itself, instead of transformers."""
        return tuple(f"{name}." for name in self._experts)

    def _as_embedding(self, model: PreTrainedModel, table: nn.Module, head: Any) -> nn.Module:
        """Returns an embedding for the linear layer `table`, which also replaces a tied head."""
        if head is not None:
            name = next(name for name, part in model.named_modules() if part is head)
            model.set_submodule(name, table)
        if isinstance(table, NarrowLinear):
            return NarrowEmbedding(table, model.dtype)
        assert isinstance(table, nn.Linear)
        made = nn.Embedding(table.out_features, table.in_features, device="meta")
        made.weight = table.weight
        return made


def await_stored(
    model: PreTrainedModel,
    path: Path,
    stored: Stored,
    cut: Mapping[str, CutOfWhole] = MappingProxyType({}),
    *,
    widened: bool = False,
) -> dict[str, StoredExperts]:
    """Replaces layers whose weights are narrow in the files of `path`. Returns where experts' tensors are.

    cut: as in `NarrowConfig`. widened: the weights will be decoded, so experts may have any activation.

    Raises BadCheckpoint, naming the tensor, for missing ones, other shapes or dtypes, scales that are not
    positive, and groups of inputs that are none.
    """
    files = TensorFiles.of(path)
    experts: dict[str, StoredExperts] = {}
    tied = _head_of(model) if is_tied(model) else None
    for name, part in list(model.named_modules()):
        if name == tied:
            continue  # its weight is the embedding's, whether the declaration names it or not
        if has_stacks(part) if widened else is_experts(part):
            if _are_joined(stored.names.in_files(name), files):
                continue
            made = NarrowExperts(part, None)
            if _are_narrow(name, made, stored):
                experts[name] = StoredExperts.find(name, made, stored, files, cut)
                model.set_submodule(name, made)
        elif type(part) in (nn.Linear, nn.Embedding):
            assert isinstance(part, nn.Linear | nn.Embedding)
            awaiting = _awaiting_stored(name, part, stored, files, cut.get(f"{name}.weight"))
            if awaiting is not None:
                model.set_submodule(name, awaiting)
    return experts


def _awaiting_stored(
    name: str,
    part: nn.Linear | nn.Embedding,
    stored: Stored,
    files: TensorFiles,
    cut: CutOfWhole | None,
) -> StoredLinear | None:
    """Returns the temporary layer for the checkpoint's tensors; None if the layer's weight is not narrow.

    cut: of the layer's weight; None if this rank has the whole. Raises as `await_stored`.
    """
    scheme = stored.scheme(name)
    if scheme is None or (isinstance(part, nn.Embedding) and scheme.dialect is not Dialect.GGUF):
        return None
    rows, columns = _shape(part)
    if not rows * columns:
        return None  # of 0 shared experts
    refusal = scheme.format.refuse(rows, columns)
    if refusal is not None:
        raise BadCheckpoint(
            f"{files.directory}: {name} cannot be stored as declared",
            why=refusal,
            ways_out=(COMPARE_CONFIG,),
        )
    of_rank = None
    if cut is not None:
        of_rank, (rows, columns) = cut
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for short, wanted in parts_of(scheme, rows, columns).items():
        entry = files.find(f"{stored.names.in_files(name)}.{short}", wanted)
        if entry is None:
            continue
        held = _held(scheme, short, tuple(entry.shape), (rows, columns), of_rank)
        tensors[short] = entry.dtype, held
        if wanted.is_scale:
            check_scales(entry.name, files.read(entry.name), wanted.ways_out)
        if wanted.role is Role.ORDER:
            read_order(entry.name, files.read(entry.name), scheme)
    if isinstance(part, nn.Embedding):
        return StoredEmbedding(scheme, part, tensors)
    return StoredLinear(scheme, part, tensors)


def _are_narrow(name: str, experts: NarrowExperts, stored: Stored) -> bool:
    """Returns whether a layer's experts are narrow. Raises BadCheckpoint if only some matrices are."""
    names = stored.names
    for product, (count, _, _) in experts.shapes.items():
        for part in names.of_product(product):
            for matrix in (names.matrix(name, expert, part) for expert in range(count)):
                reason = stored.refuse_expert(matrix)
                if reason is not None:
                    raise BadCheckpoint(
                        f"{matrix} cannot be used", why=reason, ways_out=(ONE_FORMAT,)
                    )
    return stored.scheme(names.matrix(name, 0, names.gate)) is not None


def _are_joined(path: str, files: TensorFiles) -> bool:
    """Returns whether files hold numbers of all experts in one tensor, which no declaration names."""
    found = files.entries.get(f"{path}.{PRODUCTS[0]}")
    return found is not None and found.dtype in WIDE_BYTES


def _shape(part: nn.Linear | nn.Embedding) -> tuple[int, int]:
    """Returns rows and columns of a linear layer's or an embedding's weight."""
    if isinstance(part, nn.Embedding):
        return part.num_embeddings, part.embedding_dim
    return part.out_features, part.in_features


def _decoded(narrow: NarrowLinear, dtype: torch.dtype) -> nn.Linear:
    """Returns an ordinary linear layer with the decoded weight in `dtype`."""
    made = nn.Linear(narrow.in_features, narrow.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(decode(narrow.narrow, dtype), requires_grad=False)
    if narrow.bias is not None:
        made.bias = nn.Parameter(narrow.bias, requires_grad=False)
    return made


def _held(
    scheme: Scheme, short: str, shape: tuple[int, ...], whole: tuple[int, int], of: Cut | None
) -> tuple[int, ...]:
    """Returns the shape of this rank's part of a layer's tensor [*shape]."""
    part = None if of is None else cut_part(scheme, short, shape, whole, of)
    if part is None:
        return shape
    dim = len(shape) + part.dim
    return (*shape[:dim], part.length, *shape[dim + 1 :])


class _Quantizer(HfQuantizer):
    """Makes transformers round each weight when it arrives, so that it reads one tensor at a time."""

    requires_calibration = False

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **others: Any
    ) -> bool:
        owner, _, name = param_name.rpartition(".")
        part = model.get_submodule(owner)
        if isinstance(part, NarrowExperts):
            return name in PRODUCTS
        return name == "weight" and isinstance(part, NarrowLinear)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        return 1.0 if self.param_needs_quantization(model, param_name) else param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        assert isinstance(self.quantization_config, NarrowConfig)
        return _Round(self.quantization_config)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **others: Any) -> None:
        assert isinstance(self.quantization_config, NarrowConfig)
        self.quantization_config.prepare(model)
        for name, awaited in list(model.named_parameters()):
            if self.param_needs_quantization(model, name):
                # transformers below 5.23 casts an arriving weight to this parameter's dtype. For codes' uint8
                # that would give zeros, so it is wide until the codes replace it.
                owner, short = name.rpartition(".")[::2]
                wide = torch.empty_like(awaited, dtype=model.dtype)
                setattr(model.get_submodule(owner), short, nn.Parameter(wide, requires_grad=False))

    def is_serializable(self, **_: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Round(ConversionOps):
    """Converts a weight to its codes and scales."""

    def __init__(self, config: NarrowConfig) -> None:
        self._config = config

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **others: Any,
    ) -> Any:
        """Converts {name: weight} to {tensor's name: tensor}. The module has the format."""
        model = others["model"]
        found: dict[str, Tensor] = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            name = others.get("full_layer_name") or key
            owner, _, product = name.rpartition(".")
            module = model.get_submodule(owner)
            if isinstance(module, NarrowExperts):
                numbers = weight.transpose(1, 2) if module.clamped else weight
                self._check(name, numbers, module.shapes[product])
                stack = encode_stack(numbers, module.formats[product])
                found |= named_tensors(name, stack.whole)
                continue
            assert isinstance(module, NarrowLinear)
            self._check(name, weight, (module.out_features, module.in_features))
            found |= named_tensors(name, encode_in_parts(weight, module.format))
        return found

    def _check(self, name: str, weight: Tensor, expected: tuple[int, ...]) -> None:
        if tuple(weight.shape) != expected:
            self._config.fault = BadCheckpoint(
                f"{name} has the shape {tuple(weight.shape)}", why=f"the model needs {expected}"
            )
            raise self._config.fault


@cache
def _register() -> None:
    once: Callable[[type], type] = register_quantization_config(_METHOD)
    once(NarrowConfig)
    register_quantizer(_METHOD)(_Quantizer)


def round_activations(model: PreTrainedModel, *, fast_sums: bool) -> None:
    """Makes narrow linear layers and experts round their inputs in steps of many rows.

    fast_sums: of linear layers; see `kvant.weights.rounding.RoundedRows`.
    """
    for part in model.modules():
        if isinstance(part, NarrowLinear | NarrowExperts):
            part.rounds = True
        if isinstance(part, NarrowLinear):
            part.fast_sums = fast_sums


def _round_tied_head(model: PreTrainedModel, asked: Quantization) -> None:
    """Gives the head a rounded copy of the embedding, which keeps its numbers."""
    name = _head_of(model)
    if name is None:
        return
    old = _linear(model, name)
    fmt = format_of(asked, old.in_features, is_head=True)
    new = _awaiting(old, fmt)
    new.put(encode_in_parts(old.weight.data, fmt), None if old.bias is None else old.bias.data)
    model.set_submodule(name, new)


def _awaiting(old: nn.Linear, fmt: WeightFormat) -> NarrowLinear:
    bias = None if old.bias is None else old.bias.dtype
    return NarrowLinear(fmt, old.out_features, old.in_features, bias)


def _linear(model: PreTrainedModel, name: str) -> nn.Linear:
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found
