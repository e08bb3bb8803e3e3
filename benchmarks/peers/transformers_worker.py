"""transformers' own `generate`, greedy, with its default cache (DynamicCache) and attention (sdpa).

python -m benchmarks.peers.transformers_worker MODEL_DIRECTORY THREADS DTYPE

DTYPE is float32, or auto for the checkpoint's dtype, which is transformers' default.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvant.measure.beside_transformers import decode_transformers


def decode(model: Any, case: dict[str, Any]) -> list[float]:
    """Returns milliseconds of each step. filled: the prompt's keys and values are random, not computed."""
    ids = _prompts(model, case)
    cache = None
    if case["filled"]:
        config = model.config
        cache = DynamicCache(config=config)
        shape = (len(ids), config.num_key_value_heads, case["context"] - 1, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
    return decode_transformers(model, ids, case["repeats"], cache)


def prefill(model: Any, case: dict[str, Any]) -> list[float]:
    """Returns milliseconds from a prompt to the most likely token after it."""
    times = []
    for _ in range(case["repeats"]):
        ids = _prompts(model, case)
        begin = time.perf_counter()
        with torch.inference_mode():
            model(ids, logits_to_keep=1).logits.argmax(-1)
        times.append(1000 * (time.perf_counter() - begin))
    return times


def _prompts(model: Any, case: dict[str, Any]) -> Tensor:
    numbers = random.Random(case["seed"])
    size = model.config.vocab_size
    rows = [[numbers.randrange(size) for _ in range(case["context"])] for _ in range(case["batch"])]
    return torch.tensor(rows)


def main() -> None:
    path, threads, dtype = sys.argv[1:]
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    model.requires_grad_(False)
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps((decode if case["decode"] else prefill)(model, case)), flush=True)


if __name__ == "__main__":
    main()
