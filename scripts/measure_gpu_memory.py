"""What a GPU holds while Kvant starts and works: docs/benchmarks/memory.md.

    python scripts/measure_gpu_memory.py SHAPE

SHAPE: a directory with a config.json; weights are dummies. Prints GiB after each stage: allocated and
its peak, reserved by the allocator, used on the device, and used outside of the allocator.
"""

from __future__ import annotations

import gc
import random
import sys

import torch

from kvant import LLM, SamplingParams

GIB = 2**30
SIZES = ((256, 17000), (512, 40000))


def say(stage: str) -> None:
    torch.cuda.synchronize()
    facts = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    reserved = facts["reserved_bytes.all.current"]
    shown = {
        "allocated": facts["allocated_bytes.all.current"],
        "peak": facts["allocated_bytes.all.peak"],
        "reserved": reserved,
        "used": total - free,
        "outside": total - free - reserved,
    }
    print(stage, *(f"{name} {size / GIB:.2f}" for name, size in shown.items()), flush=True)
    torch.cuda.reset_peak_memory_stats()


def load(llm: LLM, requests: int, least: int, most: int, tokens: int, **sampling: float) -> None:
    numbers = random.Random(1)
    engine = llm.engine
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **sampling)  # type: ignore[arg-type]
    for _ in range(requests):
        length = numbers.randrange(least, most + 1)
        engine.submit([numbers.randrange(engine.vocab_size) for _ in range(length)], params)
    while engine.has_work:
        engine.step()
    say(f"  {requests} prompts of {least} to {most} tokens, {sampling}:")


def main(shape: str) -> None:
    for seqs, longest in SIZES:
        gc.collect()
        torch.cuda.empty_cache()
        llm = LLM(
            shape,
            load_format="dummy",
            device="cuda",
            kv_cache_dtype="fp8_per_token_head",
            kv_cache_memory="20GiB",
            max_num_seqs=seqs,
            max_num_batched_tokens=8192,
            max_model_len=longest,
        )
        weights = llm.planned.weights_bytes or 0
        pages = llm.planned.memory.kv_bytes or 0
        beside = llm.planned.workspaces
        assert beside is not None
        print(f"{seqs} sequences of {longest}: weights and pages {(weights + pages) / GIB:.2f}")
        print(f"  counted beside them: {beside.total / GIB:.2f}, {beside}")
        say("  ready:")
        load(llm, seqs, 128, 128, 8, temperature=0.0)
        load(llm, 8, 200, longest - 10, 4, temperature=0.0)
        load(llm, 24, 200, 6000, 4, temperature=0.0)
        load(llm, seqs, 16, 16, 4, temperature=1.0, top_p=0.9)
        del llm


if __name__ == "__main__":
    main(*sys.argv[1:])
