"""transformers' own `generate`, greedy, with its default cache (DynamicCache) and attention (sdpa).

python -m kvant.measure.peers.transformers_worker MODEL_DIRECTORY THREADS
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
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria, StoppingCriteriaList

WARM_UP_STEPS = 3


class _Clock(StoppingCriteria):
    """Notes the time after each step and never stops one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def decode(model: Any, case: dict[str, Any]) -> list[float]:
    """Milliseconds of each step. Filled: the prompt's keys and values are random numbers, not computed."""
    ids = _prompts(model, case)
    steps = WARM_UP_STEPS + case["repeats"]
    cache = DynamicCache(config=model.config)
    if case["filled"]:
        config = model.config
        shape = (len(ids), config.num_key_value_heads, case["context"] - 1, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
    clock = _Clock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=steps + 1,
        min_new_tokens=steps + 1,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    found = [
        1000 * (after - before) for before, after in zip(clock.times, clock.times[1:], strict=False)
    ]
    return found[WARM_UP_STEPS:]


def prefill(model: Any, case: dict[str, Any]) -> list[float]:
    """Milliseconds from a prompt to the likeliest token after it."""
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
    path, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True
    )
    model.requires_grad_(False)
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps((decode if case["decode"] else prefill)(model, case)), flush=True)


if __name__ == "__main__":
    main()
