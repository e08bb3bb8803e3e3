"""Narrow weights while transformers loads a model: rounded as they arrive, or kept as they are stored.

transformers has a place for that: a quantiser, which replaces modules before weights arrive, and may turn
each arriving weight into other tensors. This is Kvant's, by the name "kvant". One matrix at a time is wide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.safetensors_header import TensorEntry, read_headers
from kvant.models.quantization import Quantization, format_of
from kvant.models.stored import Stored
from kvant.weights.codecs import encode_in_parts
from kvant.weights.dialects import check_order, check_part, check_scales, parts_of, read
from kvant.weights.format import Scheme, WeightFormat
from kvant.weights.linear import NarrowLinear, named_tensors

_METHOD = "kvant"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8,
    "U8": torch.uint8,
}  # fmt: skip


def chosen_layers(model: PreTrainedModel, asked: Quantization) -> dict[str, WeightFormat]:
    """The linear layers of the decoder's layers, and their formats. The head stays as it is."""
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    inside = {id(part) for part in decoder.layers.modules()}
    return {
        name: format_of(asked, part.in_features)
        for name, part in model.named_modules()
        if type(part) is nn.Linear and id(part) in inside
    }


def round_loaded(model: PreTrainedModel, asked: Quantization) -> None:
    """Replace linear layers that have their weights already, one by one."""
    for name, fmt in chosen_layers(model, asked).items():
        old = _linear(model, name)
        new = _awaiting(old, fmt, asked)
        new.put(encode_in_parts(old.weight.data, fmt), None if old.bias is None else old.bias.data)
        model.set_submodule(name, new)


class StoredLinear(nn.Module):
    """Stands for a linear layer while its tensors arrive as the checkpoint stores them.

    Its parameters have the names behind the layer's. entries: of the file, by those names.
    """

    def __init__(self, scheme: Scheme, old: nn.Linear, entries: Mapping[str, TensorEntry]) -> None:
        super().__init__()
        self.scheme, self.out_features, self.in_features = scheme, old.out_features, old.in_features
        for name, entry in entries.items():
            empty = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bias = None
        if old.bias is not None:
            self.bias = nn.Parameter(torch.empty_like(old.bias, device="meta"), requires_grad=False)

    def narrow(self, name: str) -> NarrowLinear:
        """The layer `name` with its weight, once all tensors are here."""
        tensors = dict(self.named_parameters())
        bias = tensors.pop("bias", None)
        made = read(name, self.scheme, self.out_features, self.in_features, tensors)
        new = NarrowLinear(made.format, *made.shape, None if bias is None else bias.dtype)
        new.put(made, None if bias is None else bias.data)
        return new


class NarrowConfig(QuantizationConfigMixin):
    """The argument `quantization_config` with which `from_pretrained` makes or keeps narrow weights.

    asked: round what arrives. stored: keep what the files in `path` store, as it says. fault: what is wrong
    with a weight; transformers reports another exception in its place.
    """

    def __init__(
        self, path: Path, *, asked: Quantization | None = None, stored: Stored | None = None
    ) -> None:
        _register()
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.fault: BadCheckpoint | None = None
        self._path, self._asked, self._stored = path, asked, stored
        self._shapes: dict[str, torch.Size] = {}

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": _METHOD}

    def prepare(self, model: PreTrainedModel) -> None:
        """Replace the layers of a model whose weights are to come. Sets `fault` before it raises one."""
        try:
            if self._asked is not None:
                for name, fmt in chosen_layers(model, self._asked).items():
                    model.set_submodule(name, _awaiting(_linear(model, name), fmt, self._asked))
            if self._stored is not None:
                await_stored(model, self._path, self._stored)
        except BadCheckpoint as fault:
            self.fault = fault
            raise
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def finish(self, model: PreTrainedModel) -> None:
        """Check what was loaded, and make the model an ordinary one.

        BadCheckpoint if a tensor has another shape than its module: transformers does not look here.
        """
        quantizer: Any = model.hf_quantizer
        quantizer.remove_quantization_config(model)
        for name, tensor in model.state_dict().items():
            expected = self._shapes.get(name)
            if expected is not None and tensor.shape != expected:
                raise BadCheckpoint(
                    f"{self._path}: {name} has the shape {tuple(tensor.shape)}",
                    why=f"the model needs {tuple(expected)}",
                )
        for name, part in list(model.named_modules()):
            if isinstance(part, StoredLinear):
                model.set_submodule(name, part.narrow(name))


def await_stored(model: PreTrainedModel, path: Path, stored: Stored) -> None:
    """Replace linear layers whose weights are narrow in the files of `path`.

    BadCheckpoint, naming the tensor, for missing ones, other shapes or dtypes, scales that are no positive
    numbers, and inputs that are reordered.
    """
    headers = read_headers(path) or ()
    home = {name: header.path for header in headers for name in header.tensors}
    entries = {name: entry for header in headers for name, entry in header.tensors.items()}
    for name, part in list(model.named_modules()):
        scheme = stored.scheme(name) if type(part) is nn.Linear else None
        if scheme is None:
            continue
        assert isinstance(part, nn.Linear)
        refusal = scheme.format.refuse(part.out_features, part.in_features)
        if refusal is not None:
            raise BadCheckpoint(f"{path}: {name} cannot be stored as declared", why=refusal)
        found: dict[str, TensorEntry] = {}
        for short, wanted in parts_of(scheme, part.out_features, part.in_features).items():
            entry = entries.get(f"{name}.{short}")
            shape = None if entry is None else tuple(entry.shape)
            check_part(f"{name}.{short}", wanted, None if entry is None else entry.dtype, shape)
            if entry is None:
                continue
            found[short] = entry
            if wanted.is_scale:
                check_scales(entry.name, _tensor(home[entry.name], entry.name))
            if short.endswith("g_idx"):
                index = _tensor(home[entry.name], entry.name)
                check_order(entry.name, index, scheme.format.columns)
        model.set_submodule(name, StoredLinear(scheme, part, found))


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        found: Tensor = opened.get_tensor(name)
    return found


class _Quantizer(HfQuantizer):
    """Rounds on arrival. transformers then reads one tensor at a time."""

    requires_calibration = False

    def param_needs_quantization(
        self, model: PreTrainedModel, param_name: str, **others: Any
    ) -> bool:
        owner, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(owner), NarrowLinear)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        assert isinstance(self.quantization_config, NarrowConfig)
        return _Round(self.quantization_config)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        assert isinstance(self.quantization_config, NarrowConfig)
        self.quantization_config.prepare(model)

    def is_serializable(self, **_: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Round(ConversionOps):
    """A weight into its codes and scales."""

    def __init__(self, config: NarrowConfig) -> None:
        self._config = config

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **others: Any,
    ) -> Any:
        """{name: weight} -> {name of a tensor: tensor}. The module says the format."""
        model = others["model"]
        found: dict[str, Tensor] = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            name = others.get("full_layer_name") or key
            owner = name.rpartition(".")[0]
            module = model.get_submodule(owner)
            assert isinstance(module, NarrowLinear)
            expected = (module.out_features, module.in_features)
            if tuple(weight.shape) != expected:
                self._config.fault = BadCheckpoint(
                    f"{name} has the shape {tuple(weight.shape)}", why=f"the model needs {expected}"
                )
                raise self._config.fault
            made = encode_in_parts(weight, module.format)
            found |= {f"{owner}.{part}": tensor for part, tensor in named_tensors(made).items()}
        return found


@cache
def _register() -> None:
    once: Callable[[type], type] = register_quantization_config(_METHOD)
    once(NarrowConfig)
    register_quantizer(_METHOD)(_Quantizer)


def _awaiting(old: nn.Linear, fmt: WeightFormat, asked: Quantization) -> NarrowLinear:
    bias, rounds = None if old.bias is None else old.bias.dtype, asked.rounds_activations
    return NarrowLinear(fmt, old.out_features, old.in_features, bias, rounds=rounds)


def _linear(model: PreTrainedModel, name: str) -> nn.Linear:
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found
