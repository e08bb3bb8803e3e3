"""Tiny models of experts whose weights are narrow, and their weights as numbers.

Written from the formats' documentation, tensor by tensor, like `tests.models.tiny_narrow`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from kvant.models.fused.narrow_experts import is_experts
from kvant.models.narrow import chosen_layers
from kvant.models.quantization import Quantization, format_of
from kvant.weights.codecs import decode, encode
from tests.models import families, tiny
from tests.models.tiny_narrow import DIALECTS, E2M1, Tensors

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128},
    "mixtral": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 16},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96},
}
MXFP4_LEFT = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]
_OF_FAMILIES = re.compile(
    r"layers\..*(_proj|_proj_with_mqa|experts\.\d+\.w\d|in_proj_\w+)\.weight$"
)
_EXPERTS = re.compile(r"experts\.\d+\.\w+\.weight$")
_ROUTERS = re.compile(r"(gate|wg)\.weight$")
_OF_DECODERS = re.compile(r"language_model\.layers\..*(_proj|in_proj_qkv|in_proj_z)\.weight$")
_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_LEFT = ["lm_head", r"re:.*gate$", r"re:.*\.wg$", r"re:.*conv1d.*", r"re:.*router.*"]


def build(directory: Path, dialect: str, family: str = "qwen3_moe") -> tuple[Path, Tensors]:
    """A model in a dialect of `tiny_narrow`; its directory, and its files' tensors as numbers."""
    path = tiny.build(family, directory, **SIZES[family])
    declared, make = DIALECTS[dialect]
    generator = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    numbers: Tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        numbers[name] = value
        if not re.search(r"(_proj|experts\.\d+\.w\d)\.weight$", name):
            stored[name] = value
            continue
        layer = name.removesuffix(".weight")
        tensors, numbers[name] = make(value, generator)
        stored |= {f"{layer}.{short}": tensor for short, tensor in tensors.items()}
    return _save(path, stored, declared), numbers


def build_mxfp4(directory: Path) -> tuple[Path, Tensors]:
    """gpt-oss with experts in blocks and scales; its directory, and its files' tensors as numbers."""
    path = tiny.build("gpt_oss", directory, **SIZES["gpt_oss"])
    generator = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    numbers: Tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        numbers[name] = value
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = value
            continue
        count, columns, rows = value.shape
        codes = torch.randint(0, 16, (count, rows, columns), generator=generator)
        scales = torch.randint(119, 124, (count, rows, columns // 32), generator=generator)
        packed = codes[..., ::2] | (codes[..., 1::2] << 4)
        stored[f"{name}_blocks"] = packed.to(torch.uint8).view(count, rows, columns // 32, 16)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        spread = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
        numbers[name] = (torch.cat((E2M1, -E2M1))[codes] * spread).transpose(1, 2).contiguous()
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": MXFP4_LEFT}
    return _save(path, stored, declared), numbers


def build_family(
    directory: Path,
    family: str,
    dialect: str = "ct fp8 channel",
    *,
    only_experts: bool = False,
    steers: bool = False,
    **changed: Any,
) -> tuple[Path, Path]:
    """A tiny model whose linear layers and experts are narrow, and the model of their numbers.

    only_experts: other layers have 16 bits. steers: see `steer`. changed: fields of the config. Blocks do
    not end inside a weight: layers of other sizes have 16 bits too.
    """
    narrow, exact = directory / "narrow", directory / "exact"
    config = families.build(family, narrow, **changed)
    declared, make = DIALECTS[dialect]
    chosen = _EXPERTS if only_experts else _OF_FAMILIES
    block = 128 if "block" in dialect else 1
    generator = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    numbers: Tensors = {}
    left: list[str] = []
    for name, value in load_file(narrow / "model.safetensors").items():
        if steers:
            steer(name, value)
        sizes = [size % block for size in value.shape]
        if value.ndim != 2 or not chosen.search(name) or any(sizes):
            # Released files have 16 bits, which an engine that computes in 16 bits keeps.
            stored[name] = numbers[name] = value.bfloat16().float()
            left += [name.removesuffix(".weight")] if value.ndim == 2 else []
            continue
        tensors, numbers[name] = make(value, generator)
        stored |= {name.removesuffix("weight") + short: one for short, one in tensors.items()}
    field = "modules_to_not_convert" if declared["quant_method"] == "fp8" else "ignore"
    said = {**config, "quantization_config": {**declared, field: [*_LEFT, *left]}}
    exact.mkdir()
    for path, tensors, fields in ((narrow, stored, said), (exact, numbers, config)):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(fields))
    return narrow, exact


@torch.no_grad()
def round_weights(model: Any, quantization: Quantization) -> None:
    """Gives transformers' model the numbers of its weights when they are rounded."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    matrices = [
        (model.get_submodule(name).weight, fmt)
        for name, fmt in chosen_layers(model, quantization).items()
    ]
    for part in model.modules():
        for name in ("gate_up_proj", "down_proj") if is_experts(part) else ():
            for weight in getattr(part, name):
                matrix = weight.t() if hasattr(part, "alpha") else weight
                matrices.append((matrix, format_of(quantization, matrix.shape[1])))
    for matrix, fmt in matrices:
        matrix.copy_(decode(encode(matrix.float(), fmt)))


def steer(name: str, value: Tensor) -> None:
    """Lets a token's id choose its two of four experts: rounding then moves no choice.

    Four numbers of the residual stream say how much a token wants each expert. They come from the embedding,
    which is as large as what layers add, and routers read them beside their random weights. Biases of choices
    become small: a softmax leaves so little to the second expert that a bias would choose it.
    """
    if name.endswith("embed_tokens.weight"):
        value /= value.std()
        wishes = list(permutations((8.0, 6.0, -6.0, -8.0)))
        value[:, :4] = torch.tensor([wishes[token % len(wishes)] for token in range(len(value))])
    elif _ROUTERS.search(name) and len(value) == 4:
        value[:, :4] += torch.eye(4)
    elif name.endswith("e_score_correction_bias"):
        value *= 0.01


def build_nested(
    directory: Path, family: str, dialect: str = "ct fp8 channel", **text: int
) -> tuple[Path, Path, Tensors]:
    """A tiny model with a vision encoder, as released: a narrow decoder, with experts one by one.

    text: fields of the decoder. Returns also the model of the numbers, and the numbers of narrow matrices.
    """
    narrow, exact = directory / "narrow", directory / "exact"
    config = families.tiny_config(family)
    for name, value in text.items():
        setattr(config.text_config, name, value)
    for name, value in _TOWER.items():
        setattr(config.vision_config, name, value)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    declared, make = DIALECTS[dialect]
    generator = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    numbers: Tensors = {}
    for name, tensor in model.state_dict().items():
        torch.nn.init.normal_(tensor, 0.5 if tensor.ndim == 1 else 0.0, 0.15)
        for path, matrix in apart(name, tensor):
            if matrix.ndim != 2 or not _OF_DECODERS.search(path):
                stored[path] = matrix.contiguous()
                continue
            codes, numbers[path] = make(matrix, generator)
            matrix.copy_(numbers[path])
            stored |= {path.removesuffix("weight") + short: one for short, one in codes.items()}
    model.save_pretrained(exact)
    said = json.loads((exact / "config.json").read_text())
    wide = {path for path in stored.keys() - numbers.keys() if path.endswith(".weight")}
    field = "modules_to_not_convert" if declared["quant_method"] == "fp8" else "ignore"
    left = {field: sorted(path.removesuffix(".weight") for path in wide)}
    narrow.mkdir()
    save_file(stored, narrow / "model.safetensors", metadata={"format": "pt"})
    quantised = {**said, "quantization_config": {**declared, **left}}
    (narrow / "config.json").write_text(json.dumps(quantised))
    return narrow, exact, numbers


def apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a module of experts, one by one, as views; other tensors as they are."""
    module, _, product = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(product)
    if parts is None:
        yield name, tensor
        return
    for index, one in enumerate(tensor):
        for part, matrix in zip(parts, one.chunk(len(parts)), strict=True):
            yield f"{module}.{index}.{part}.weight", matrix


def change(path: Path, function: Callable[[dict[str, Tensor]], None]) -> Path:
    """Change a model's tensors in its file."""
    tensors = load_file(path / "model.safetensors")
    function(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def wide(path: Path, numbers: Tensors, directory: Path) -> Path:
    """The same model with its weights as numbers."""
    directory.mkdir()
    save_file(numbers, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _save(path: Path, stored: Tensors, declared: dict[str, Any]) -> Path:
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": declared}))
    return path
