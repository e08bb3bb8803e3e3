"""Memory of a GPU while Kvant starts and works: docs/benchmarks/memory.md.

    python -m benchmarks.gpu_memory SHAPE [--share 0.9] [--out FILE]

SHAPE: a directory with a config.json; weights are dummies. Prints GiB after each stage: allocated and
its peak, reserved by the allocator, used on the device, and used outside the allocator. Pages take
20 GiB, or with --share the rest of that share of the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from pathlib import Path

import torch

from kvant import LLM, SamplingParams
from kvant.measure.facts import command_line, measurement_facts

GIB = 2**30
SIZES = ((256, 17000), (512, 40000))


def say(stage: str) -> float:
    """Prints memory after a stage; returns GiB used on the device now."""
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
    return (total - free) / GIB


def load(llm: LLM, requests: int, least: int, most: int, tokens: int, **sampling: float) -> float:
    """Loads the model; returns GiB used on the device afterwards, at the allocator's peak."""
    numbers = random.Random(1)
    engine = llm.engine
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **sampling)  # type: ignore[arg-type]
    for _ in range(requests):
        length = numbers.randrange(least, most + 1)
        engine.submit([numbers.randrange(engine.vocab_size) for _ in range(length)], params)
    while engine.has_work:
        engine.step()
    return say(f"  {requests} prompts of {least} to {most} tokens, {sampling}:")


def measure(shape: str, seqs: int, longest: int, share: float | None) -> dict[str, object]:
    room: dict[str, object] = {"kv_cache_memory": "20GiB"}
    if share is not None:
        room = {"gpu_memory_utilization": share}
    llm = LLM(
        shape,
        load_format="dummy",
        device="cuda",
        kv_cache_dtype="fp8_per_token_head",
        max_num_seqs=seqs,
        max_num_batched_tokens=8192,
        max_model_len=longest,
        **room,  # type: ignore[arg-type]
    )
    weights = llm.planned.weights_bytes or 0
    pages = llm.planned.memory.kv_bytes or 0
    beside = llm.planned.workspaces
    assert beside is not None
    print(f"{seqs} sequences of {longest}: weights and pages {(weights + pages) / GIB:.2f}")
    print(f"  counted beside them: {beside.total / GIB:.2f}, {beside}")
    used = [
        say("  ready:"),
        load(llm, seqs, 128, 128, 8, temperature=0.0),
        load(llm, 8, 200, longest - 10, 4, temperature=0.0),
        load(llm, 24, 200, 6000, 4, temperature=0.0),
        load(llm, seqs, 16, 16, 4, temperature=1.0, top_p=0.9),
    ]
    return {
        "max_num_seqs": seqs,
        "max_model_len": longest,
        "share": share,
        "device_gib": torch.cuda.mem_get_info()[1] / GIB,
        "weights_gib": weights / GIB,
        "pages_gib": pages / GIB,
        "counted_beside_gib": beside.total / GIB,
        "used_gib": used,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--share", type=float)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for seqs, longest in SIZES:
        rows.append(measure(options.shape, seqs, longest, options.share))
        gc.collect()
        torch.cuda.empty_cache()
    if options.out is not None:
        command = command_line("python -m benchmarks.gpu_memory")
        facts = measurement_facts(command, ["torch", "triton", "transformers"])
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
