"""Tiny Llamas whose weights are narrow, in the dialects of checkpoints; and their weights as numbers.

Written from the formats' documentation, tensor by tensor, with numpy where bits are packed, so that reading
them back is not tested with the code that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import tiny

Tensors = dict[str, Tensor]
Layer = Callable[[Tensor, torch.Generator], tuple[Tensors, Tensor]]
"""A weight [rows, columns] -> tensors by the names behind the layer's, and the numbers they mean."""

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The output that each nibble of a word holds, the lowest first (AutoAWQ's packing)."""


def _words(codes: np.ndarray[Any, Any], bits: int, order: list[int] | None = None) -> Tensor:
    """Codes [n, m] packed along m into int32 words, the lowest bits first."""
    count = 32 // bits
    grouped = codes.astype(np.uint64).reshape(codes.shape[0], -1, count)
    if order is not None:
        grouped = grouped[:, :, order]
    words = np.zeros(grouped.shape[:2], np.uint64)
    for place in range(count):
        words |= grouped[:, :, place] << np.uint64(place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _fp8(scales: tuple[int, ...] | None, name: str) -> Layer:
    """scales: their shape; None for one per output, (1, 1) for one per block of 128 x 128."""

    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        rows, columns = weight.shape
        shape = (rows, 1) if scales is None else scales
        if scales == (1, 1):
            shape = -(-rows // 128), -(-columns // 128)
        factor = torch.rand(shape, generator=generator) * 0.01 + 0.01
        codes = (weight * 64).to(torch.float8_e4m3fn)
        spread = factor if scales is None else factor.reshape(1, 1) if scales == (1,) else factor
        if scales == (1, 1):
            spread = spread.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return {"weight": codes, name: factor}, codes.float() * spread

    return make


def _stream(codes: np.ndarray[Any, Any], bits: int) -> Tensor:
    """Codes [n, m] as a stream of bits, the lowest first, in int32 words."""
    single = (codes[..., None].astype(np.uint8) >> np.arange(bits)) & 1
    packed = np.packbits(single.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little")
    words = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
    return torch.from_numpy(words.view(np.int32).copy())


def packed(bits: int, size: int | None, *, zero_points: bool) -> tuple[dict[str, Any], Layer]:
    """compressed-tensors' packed integers of any width, with groups of `size` or a scale per output."""
    declared: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": not zero_points}
    declared |= (
        {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    )

    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        rows, columns = weight.shape
        groups = 1 if size is None else columns // size
        codes = torch.randint(0, 1 << bits, weight.shape, generator=generator)
        scales = (torch.rand((rows, groups), generator=generator) * 0.01 + 0.01).bfloat16()
        zeros = torch.full((rows, groups), 1 << (bits - 1))
        tensors = {"weight_packed": _stream(codes.numpy(), bits), "weight_scale": scales}
        if zero_points:
            zeros = torch.randint(0, 1 << bits, zeros.shape, generator=generator)
            tensors["weight_zero_point"] = _stream(zeros.numpy().T, bits).t().contiguous()
        numbers = codes - zeros.repeat_interleave(columns // groups, 1)
        return tensors, numbers.float() * scales.float().repeat_interleave(columns // groups, 1)

    return _group("pack-quantized", **declared), make


def whole_bytes(
    bits: int, strategy: str, size: int | None, *, zero_points: bool
) -> tuple[dict[str, Any], Layer]:
    """compressed-tensors' integers in a byte each. size: of groups, None for another strategy."""
    declared: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": not zero_points}
    declared |= {"strategy": strategy, "group_size": size}
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)

    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        rows, columns = weight.shape
        shape = (1, 1) if strategy == "tensor" else (rows, columns // (size or columns))
        codes = torch.randint(low, high, weight.shape, generator=generator)
        scales = (torch.rand(shape, generator=generator) * 0.01 + 0.01).bfloat16()
        zeros = torch.zeros(shape)
        if zero_points:
            zeros = torch.randint(low, high, shape, generator=generator)
        across = columns // shape[1]
        spread = (codes - zeros.repeat_interleave(across, 1)).float()
        numbers = spread * scales.float().repeat_interleave(across, 1)
        if strategy == "tensor":
            scales, zeros = scales.reshape(1), zeros.reshape(1)
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
        if zero_points:
            tensors["weight_zero_point"] = zeros.to(torch.int8)
        return tensors, numbers

    return _group("int-quantized", **declared), make


INPUT_SCALE = 0.0625
"""By which layers of dialects with static scales round what they multiply."""


def _static(layer: Layer, name: str, dtype: torch.dtype = torch.float32) -> Layer:
    """The same layer, with a scale of its inputs by this name."""

    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        tensors, numbers = layer(weight, generator)
        return {**tensors, name: torch.tensor(INPUT_SCALE, dtype=dtype)}, numbers

    return make


def _groups(columns: int, size: int, order: int | None, generator: torch.Generator) -> Tensor:
    """The group of each input: neighbours for None, else shuffled. order: equal for inputs in one order."""
    groups = torch.arange(columns) // size
    if order is None:
        return groups
    if order:
        generator = torch.Generator().manual_seed(order)
    return groups[torch.randperm(columns, generator=generator)]


def _int4(group: int, *, zero_points: bool, dialect: str, order: int | None = None) -> Layer:
    """order: inputs are reordered, alike in all layers of a width; 0 for another order in each."""

    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        rows, columns = weight.shape
        index = _groups(columns, group, order, generator)
        codes = torch.randint(0, 16, (rows, columns), generator=generator)
        zeros = torch.full((rows, columns // group), 8)
        if zero_points:
            zeros = torch.randint(1, 15, zeros.shape, generator=generator)
        scales = (torch.rand(zeros.shape, generator=generator) * 0.02 + 0.01).half()
        numbers = (codes - zeros[:, index]).float() * scales.float()[:, index]
        c, z = codes.numpy(), zeros.numpy()
        if dialect == "awq":
            tensors = {
                "qweight": _words(c.T, 4, AWQ_ORDER), "scales": scales.t().contiguous(),
                "qzeros": _words(z.T, 4, AWQ_ORDER),
            }  # fmt: skip
        elif dialect == "gptq":
            tensors = {
                "qweight": _words(c, 4).t().contiguous(), "scales": scales.t().contiguous(),
                "qzeros": _words((z - 1).T, 4),
                "g_idx": index.int(),
            }  # fmt: skip
        else:
            tensors = {
                "weight_packed": _words(c, 4), "weight_scale": scales,
                "weight_shape": torch.tensor([rows, columns]),
            }  # fmt: skip
            if zero_points:
                tensors["weight_zero_point"] = _words(z.T, 4).t().contiguous()
            if order is not None:
                tensors["weight_g_idx"] = index.int()
        return tensors, numbers

    return make


def _int8_groups(group: int) -> Layer:
    """Inputs are in another order in each layer."""

    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        columns = weight.shape[1]
        index = _groups(columns, group, 0, generator)
        codes = torch.randint(-127, 128, weight.shape, generator=generator)
        scales = torch.rand((len(weight), columns // group), generator=generator) * 0.001 + 0.001
        tensors = {
            "weight_packed": _words((codes + 128).numpy(), 8), "weight_scale": scales,
            "weight_g_idx": index.int(),
        }  # fmt: skip
        return tensors, codes.float() * scales[:, index]

    return make


def _int8(*, packed: bool) -> Layer:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        codes = torch.randint(-127, 128, weight.shape, generator=generator)
        scales = torch.rand((len(weight), 1), generator=generator) * 0.001 + 0.001
        stored = {"weight": codes.to(torch.int8)}
        if packed:
            stored = {"weight_packed": _words((codes + 128).numpy(), 8)}
        return {**stored, "weight_scale": scales}, codes.float() * scales

    return make


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _float4(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Packed bytes with the even input in the low half, and the numbers."""
    codes = torch.randint(0, 16, weight.shape, generator=generator)
    values = torch.cat((E2M1, -E2M1))[codes]
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return packed, values


def _nvfp4(names: tuple[str, str], factor: float, *, divides: bool) -> Layer:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        packed, values = _float4(weight, generator)
        shape = (weight.shape[0], weight.shape[1] // 16)
        scales = (torch.rand(shape, generator=generator) + 0.1).to(torch.float8_e4m3fn)
        stored = torch.tensor([1 / factor if divides else factor])
        spread = scales.float().repeat_interleave(16, 1)
        return {
            names[0]: packed,
            "weight_scale": scales,
            names[1]: stored,
        }, values * spread * factor

    return make


def _mxfp4(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    packed, values = _float4(weight, generator)
    shape = (weight.shape[0], weight.shape[1] // 32)
    scales = torch.randint(119, 124, shape, generator=generator).to(torch.uint8)
    spread = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    return {"weight_packed": packed, "weight_scale": scales}, values * spread


def _group(layout: str, inputs: dict[str, Any] | None = None, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    if inputs is not None:
        group["input_activations"] = inputs
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_STATIC = {**_FP8, "strategy": "tensor", "dynamic": False}
DIALECTS: dict[str, tuple[dict[str, Any], Layer]] = {
    "fp8 block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        _fp8((1, 1), "weight_scale_inv"),
    ),
    "ct fp8 tensor": (_group("float-quantized", **_FP8, strategy="tensor"), _fp8((1,), "weight_scale")),
    "ct fp8 channel": (_group("float-quantized", **_FP8, strategy="channel"), _fp8(None, "weight_scale")),
    "ct int8": (
        _group("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        _int8(packed=False),
    ),
    "ct int8 packed": (
        _group("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        _int8(packed=True),
    ),
    "ct int4": (
        _group("pack-quantized", **_INT4, symmetric=True),
        _int4(32, zero_points=False, dialect="pack"),
    ),
    "ct int4 zero points": (
        _group("pack-quantized", **_INT4, symmetric=False),
        _int4(32, zero_points=True, dialect="pack"),
    ),
    "ct int4 reordered": (
        _group("pack-quantized", **_INT4, symmetric=True, actorder="group"),
        _int4(32, zero_points=False, dialect="pack", order=0),
    ),
    "ct int4 zero points reordered": (
        _group("pack-quantized", **_INT4, symmetric=False, actorder="group"),
        _int4(32, zero_points=True, dialect="pack", order=1),
    ),
    "ct int8 reordered": (
        _group("pack-quantized", **{**_INT4, "num_bits": 8}, symmetric=True, actorder="group"),
        _int8_groups(32),
    ),
    "ct nvfp4": (
        _group("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        _nvfp4(("weight_packed", "weight_global_scale"), 0.25, divides=True),
    ),
    "ct mxfp4": (
        _group("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        _mxfp4,
    ),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        _static(_fp8((), "weight_scale"), "input_scale"),
    ),
    "ct fp8 static": (
        _group("float-quantized", _STATIC, **_FP8, strategy="tensor"),
        _static(_fp8((1,), "weight_scale"), "input_scale", torch.bfloat16),
    ),
    "ct fp8 static channel": (
        _group("float-quantized", _STATIC, **_FP8, strategy="channel"),
        _static(_fp8(None, "weight_scale"), "input_scale"),
    ),
    "fp8 static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        _static(_fp8((), "weight_scale_inv"), "activation_scale"),
    ),
    "autofp8 static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        _static(_fp8((), "weight_scale"), "input_scale"),
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        _nvfp4(("weight", "weight_scale_2"), 0.125, divides=False),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        _int4(32, zero_points=True, dialect="awq"),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        _int4(32, zero_points=True, dialect="gptq"),
    ),
    "gptq reordered": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        _int4(32, zero_points=True, dialect="gptq", order=1),
    ),
}  # fmt: skip
"""quantization_config and layers, by dialect."""


def build(directory: Path, dialect: str, **changes: Any) -> tuple[Path, Tensors]:
    """Save a Llama in this dialect; return its directory, and its whole state as numbers.

    changes: of its configuration.
    """
    path = tiny.build("llama", directory, **changes)
    declared, make = DIALECTS[dialect]
    generator = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    numbers: Tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        numbers[name] = value
        if not name.endswith("_proj.weight"):
            stored[name] = value
            continue
        layer = name.removesuffix(".weight")
        tensors, numbers[name] = make(value, generator)
        stored |= {f"{layer}.{short}": tensor for short, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = declared
    (path / "config.json").write_text(json.dumps(config))
    return path, numbers
