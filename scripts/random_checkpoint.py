"""Write a checkpoint of random weights in the shape of a config.json.

    python scripts/random_checkpoint.py SHAPE OUT [--tokenizer DIRECTORY] [--fp8]

SHAPE: a directory with a config.json. If it declares mxfp4, as gpt-oss does, experts are random blocks and
scales. The tokenizer is another model's, with made-up words added to its vocabulary, so that every token of
a random model has a text; without one, OUT takes and gives token ids only. --fp8: weights of decoder layers
as compressed-tensors stores them, float8 with a scale for each output channel, and a KV cache scheme with
scales for K and V. For benchmarks, in which two engines then run the same weights: answers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

SHARD_BYTES = 2**30
SPREAD = 0.02
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FLOAT8_MAX = 448.0
KV_SCALE = 0.02
"""Scale of K and V; layer i has i per cent more, so that all differ."""
MXFP4_BLOCK = 32
MXFP4_SCALE = 119
"""The smaller of two exponents of blocks, 2 ** -8. With random codes, numbers then spread by 0.018."""


class Kind(Enum):
    """How a matrix is stored. Vectors are numbers."""

    NUMBERS = 2.0
    FLOAT8 = 1.0
    MXFP4 = 0.5 + 1 / MXFP4_BLOCK

    @property
    def bytes(self) -> float:
        """Bytes of a number, without the few of scales of outputs."""
        return self.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--fp8", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True)
    started = time.perf_counter()
    size = write_weights(asked.shape, asked.out, fp8=asked.fp8)
    if asked.tokenizer is not None:
        write_tokenizer(asked.tokenizer, asked.out)
    seconds = time.perf_counter() - started
    print(f"{asked.out}: {size / 2**30:.1f} GiB in {seconds:.1f} s")


def write_weights(shape: Path, out: Path, *, fp8: bool) -> int:
    """Writes config.json, shards and their index; returns the bytes of all tensors.

    Threads make and write shards, each with the shard's own random numbers. So memory holds a few shards.
    """
    declared = json.loads((shape / "config.json").read_text())
    mxfp4 = (declared.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    config = AutoConfig.from_pretrained(str(shape), local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    linear = {f"{n}.weight" for n, m in model.named_modules() if type(m) is nn.Linear}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    shards: list[dict[str, tuple[torch.Size, Kind]]] = [{}]
    planned = 0.0
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        kind = Kind.NUMBERS
        if fp8 and name in linear and "lm_head" not in name:
            kind = Kind.FLOAT8
        elif mxfp4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            kind = Kind.MXFP4
        if planned > SHARD_BYTES:
            shards.append({})
            planned = 0.0
        shards[-1][name] = tensor.shape, kind
        planned += tensor.numel() * kind.bytes
    beside = _kv_scales(config.num_hidden_layers) if fp8 else {}
    files = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]

    def write(number: int) -> Mapping[str, int]:
        more = beside if number == 0 else {}
        made = _shard(shards[number], number) | more
        save_file(made, out / files[number], {"format": "pt"})
        return {name: tensor.nbytes for name, tensor in made.items()}

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        written = list(pool.map(write, range(len(shards))))
    size = sum(sum(held.values()) for held in written)
    names = {name: file for file, held in zip(files, written, strict=True) for name in held}
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    declared |= {"quantization_config": _declared()} if fp8 else {}
    (out / "config.json").write_text(json.dumps(declared, indent=1))
    return size


def write_tokenizer(source: Path, out: Path) -> None:
    """Writes the tokenizer's files, with as many tokens as config.json says."""
    config = json.loads((out / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token in range(max(vocabulary.values()) + 1, config["vocab_size"]):
        vocabulary[f"\u0120w{token}"] = token  # U+0120 is a blank, in bytes' spelling
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copy(source / name, out / name)


def _shard(held: Mapping[str, tuple[torch.Size, Kind]], seed: int) -> dict[str, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, (dims, kind) in held.items():
        made = _tensors(name, dims, kind, generator)
        found |= {key: value.cpu() for key, value in made.items()}
    return found


def _tensors(
    name: str, dims: torch.Size, kind: Kind, generator: torch.Generator
) -> dict[str, Tensor]:
    device = generator.device
    if len(dims) < 2:
        fill = torch.zeros if name.endswith(".bias") else torch.ones
        return {name: fill(dims, dtype=torch.bfloat16, device=device)}
    if (
        kind is Kind.MXFP4
    ):  # transformers' module has [experts, inputs, outputs], the file outputs first
        count, inputs, outputs = dims
        shape = count, outputs, inputs // MXFP4_BLOCK
        return {
            f"{name}_blocks": _random_bytes((*shape, MXFP4_BLOCK // 2), generator),
            f"{name}_scales": (_random_bytes(shape, generator) & 1) + MXFP4_SCALE,
        }
    made = torch.empty(dims, dtype=torch.bfloat16, device=device)
    made.normal_(0.0, SPREAD, generator=generator)
    if kind is Kind.NUMBERS:
        return {name: made}
    channel = made.float().abs().amax(1, keepdim=True) / FLOAT8_MAX
    return {
        name: (made.float() / channel).to(torch.float8_e4m3fn),
        f"{name}_scale": channel.to(torch.bfloat16),
    }


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns random bytes, uint8 [*shape], eight for each number drawn."""
    size = math.prod(shape)
    words = torch.empty(-(-size // 8), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:size].view(shape)


def _kv_scales(num_layers: int) -> dict[str, Tensor]:
    return {
        f"model.layers.{index}.self_attn.{side}_scale": torch.tensor([KV_SCALE * 1.01**index])
        for index in range(num_layers)
        for side in "kv"
    }


def _declared() -> dict[str, object]:
    group = {
        "targets": ["Linear"],
        "weights": {**FLOAT8, "strategy": "channel", "dynamic": False},
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {**FLOAT8, "strategy": "tensor", "dynamic": False},
    }


if __name__ == "__main__":
    main()
