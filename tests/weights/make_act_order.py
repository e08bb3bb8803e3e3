"""Writes act_order.json: weights with reordered inputs, as compressed-tensors 0.12.2 packs and decodes them.

Later releases have no code for `weight_g_idx`. The golden bytes were made with these commands:

    pip download --no-deps -d /tmp/old compressed-tensors==0.12.2
    python -m zipfile -e /tmp/old/compressed_tensors-0.12.2-py3-none-any.whl /tmp/old
    PYTHONPATH=/tmp/old python tests/weights/make_act_order.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors import __version__
from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
    PackedQuantizationCompressor,
    unpack_from_int32,
)
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor

ROWS, COLUMNS, GROUP = 8, 96, 32
CASES = (
    ("int4", 4, True, torch.float16),
    ("int4 zero points", 4, False, torch.bfloat16),
    ("int8", 8, True, torch.float32),
)


def one(bits: int, symmetric: bool, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    index = (torch.arange(COLUMNS) // GROUP)[torch.randperm(COLUMNS, generator=generator)].int()
    args = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=GROUP,
        actorder="group",
    )  # fmt: skip
    groups = weight[:, index.argsort(stable=True)].view(ROWS, -1, GROUP).float()
    largest = groups.abs().amax(-1)
    scale = (largest / (2 ** (bits - 1) - 1)).to(dtype)
    zeros = None
    if not symmetric:
        zeros = torch.randint(-7, 7, scale.shape, generator=generator).to(torch.int8)
    compressor = PackedQuantizationCompressor()
    found = compressor.compress_weight(weight, scale, args, zero_point=zeros, g_idx=index)
    codes = unpack_from_int32(found["weight_packed"], bits, weight.shape)
    numbers = dequantize(codes, scale, zero_point=zeros, g_idx=index)
    found |= {"weight_scale": scale, "weight_g_idx": index}
    if symmetric:
        assert torch.equal(compressor.decompress_weight(found, args), numbers)
    return {**found, "numbers": numbers}


def text(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes().hex()
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "data": data}


if __name__ == "__main__":
    assert __version__ == "0.12.2", __version__
    made: dict[str, Any] = {"compressed-tensors": __version__, "torch": torch.__version__}
    for seed, (name, bits, symmetric, dtype) in enumerate(CASES):
        tensors = one(bits, symmetric, dtype, seed)
        made[name] = {short: text(tensor) for short, tensor in tensors.items()}
    place = Path(__file__).with_name("act_order.json")
    place.write_text(json.dumps(made, indent=1) + "\n")
