"""Write a checkpoint of random weights in the shape of a config.json, with a tokenizer that works.

    python scripts/random_checkpoint.py SHAPE OUT --tokenizer DIRECTORY [--fp8]

SHAPE: a directory with a config.json. The tokenizer is another model's, with made-up words added to its
vocabulary, so that every token of a random model has a text. --fp8: weights of
decoder layers as compressed-tensors stores them, float8 with a scale for each output channel, and a
KV cache scheme with scales for K and V. For benchmarks of a server: answers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

SHARD_BYTES = 2 * 2**30
SPREAD = 0.02
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FLOAT8_MAX = 448.0
KV_SCALE = 0.02
"""Scale of K and V; layer i has i per cent more, so that all differ."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--fp8", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True)
    started = time.perf_counter()
    size = write_weights(asked.shape, asked.out, fp8=asked.fp8)
    write_tokenizer(asked.tokenizer, asked.out)
    seconds = time.perf_counter() - started
    print(f"{asked.out}: {size / 2**30:.1f} GiB in {seconds:.1f} s")


def write_weights(shape: Path, out: Path, *, fp8: bool) -> int:
    """Writes config.json, shards and their index; returns the bytes of all tensors."""
    config = AutoConfig.from_pretrained(str(shape), local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    linear = {f"{n}.weight" for n, m in model.named_modules() if type(m) is nn.Linear}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    shapes = {n: (t.shape, n in linear) for n, t in model.state_dict().items() if n not in tied}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    shards: list[dict[str, Tensor]] = [{}]
    saved: list[str] = []
    writing: list[Future[None]] = []
    size = 0
    names: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool:
        for name, (dims, is_linear) in shapes.items():
            made = _tensors(name, dims, is_linear and fp8, generator)
            if sum(t.nbytes for t in shards[-1].values()) > SHARD_BYTES:
                shards.append({})
            shards[-1] |= {key: value.cpu() for key, value in made.items()}
        if fp8:
            shards[-1] |= _kv_scales(config.num_hidden_layers)
        for number, shard in enumerate(shards):
            saved.append(f"model-{number + 1:05}-of-{len(shards):05}.safetensors")
            names |= dict.fromkeys(shard, saved[-1])
            size += sum(t.nbytes for t in shard.values())
            writing.append(pool.submit(save_file, shard, out / saved[-1], {"format": "pt"}))
    for one in writing:
        one.result()
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    declared = json.loads((shape / "config.json").read_text())
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


def _tensors(
    name: str, dims: torch.Size, is_float8: bool, generator: torch.Generator
) -> dict[str, Tensor]:
    device = generator.device
    if len(dims) < 2:
        fill = torch.zeros if name.endswith(".bias") else torch.ones
        return {name: fill(dims, dtype=torch.bfloat16, device=device)}
    made = torch.empty(dims, dtype=torch.bfloat16, device=device)
    made.normal_(0.0, SPREAD, generator=generator)
    if not is_float8 or "lm_head" in name:
        return {name: made}
    channel = made.float().abs().amax(1, keepdim=True) / FLOAT8_MAX
    return {
        name: (made.float() / channel).to(torch.float8_e4m3fn),
        f"{name}_scale": channel.to(torch.bfloat16),
    }


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
