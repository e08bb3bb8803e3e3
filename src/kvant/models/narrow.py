"""Weights that are rounded while transformers loads them: one matrix at a time, on their device.

transformers has a place for that: a quantiser, which replaces modules before weights arrive, and turns
each arriving weight into the tensors that the module keeps. This is Kvant's, by the name "kvant".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvant.errors import BadCheckpoint
from kvant.models.quantization import Quantization, format_of
from kvant.weights.codecs import encode_in_parts
from kvant.weights.format import WeightFormat
from kvant.weights.linear import NarrowLinear, named_tensors

_METHOD = "kvant"


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
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear)
        new = _awaiting(old, fmt)
        new.put(encode_in_parts(old.weight.data, fmt), None if old.bias is None else old.bias.data)
        model.set_submodule(name, new)


class RoundingConfig(QuantizationConfigMixin):
    """The argument `quantization_config` with which `from_pretrained` rounds what it reads.

    fault: what is wrong with a weight; transformers reports another exception in its place.
    """

    def __init__(self, asked: Quantization) -> None:
        _register()
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.asked = asked
        self.fault: BadCheckpoint | None = None
        self._shapes: dict[str, torch.Size] = {}

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": _METHOD, "asked": self.asked.value}

    def expect(self, model: PreTrainedModel) -> None:
        """Remember the shapes of a model whose weights are to come."""
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def finish(self, path: Path, model: PreTrainedModel) -> None:
        """Check what was loaded, and make the model an ordinary one.

        BadCheckpoint if a tensor has another shape than its module: transformers does not look here.
        """
        quantizer: Any = model.hf_quantizer
        quantizer.remove_quantization_config(model)
        for name, tensor in model.state_dict().items():
            expected = self._shapes.get(name)
            if expected is not None and tensor.shape != expected:
                raise BadCheckpoint(
                    f"{path}: {name} has the shape {tuple(tensor.shape)}",
                    why=f"the model needs {tuple(expected)}",
                )


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
        assert isinstance(self.quantization_config, RoundingConfig)
        return _Round(self.quantization_config)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config: Any = self.quantization_config
        for name, fmt in chosen_layers(model, config.asked).items():
            old = model.get_submodule(name)
            assert isinstance(old, nn.Linear)
            model.set_submodule(name, _awaiting(old, fmt))
        config.expect(model)

    def is_serializable(self, **_: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Round(ConversionOps):
    """A weight into its codes and scales."""

    def __init__(self, config: RoundingConfig) -> None:
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
    once(RoundingConfig)
    register_quantizer(_METHOD)(_Quantizer)


def _awaiting(old: nn.Linear, fmt: WeightFormat) -> NarrowLinear:
    bias = None if old.bias is None else old.bias.dtype
    return NarrowLinear(fmt, old.out_features, old.in_features, bias)
