"""The loads of `kvant bench throughput`, offered to vLLM: the peer of docs/benchmarks/throughput.md.

    python -m benchmarks.vllm SHAPE --kv-cache-dtype auto|fp8 --load 32x128/256 .. --out FILE

SHAPE: a directory with a config.json; weights are vLLM's dummies, or with --load-format auto those of the
directory, such as scripts/random_checkpoint.py writes. vLLM leaves codes in integers zero, so its narrow
experts need such files to be chosen by more than a bias. Runs where vLLM is installed and does not import
Kvant. Everything is vLLM's default, except for what makes the two comparable: no prefix cache, greedy,
answers exactly as long as asked, and the share of the GPU's memory. --engine adds what a shape needs, such
as '{"quantization":"fp8"}'.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Its other sampler needs FlashInfer; greedy requests use neither.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
NAMES = {"auto": "bfloat16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--load", action="append", required=True, metavar="REQUESTSxINPUT/OUTPUT")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=17000)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="instead of that share")
    parser.add_argument(
        "--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM"
    )
    parser.add_argument(
        "--load-format", default="dummy", help="auto: read the files beside config.json"
    )
    parser.add_argument("--out")
    asked = parser.parse_args()
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(
        model=asked.shape,
        load_format=asked.load_format,
        skip_tokenizer_init=True,
        kv_cache_dtype=asked.kv_cache_dtype,
        max_model_len=asked.max_model_len,
        gpu_memory_utilization=asked.gpu_memory_utilization,
        kv_cache_memory_bytes=asked.kv_cache_memory_bytes,
        enable_prefix_caching=False,
        **asked.engine,
    )
    ready = time.perf_counter() - start
    config = llm.llm_engine.vllm_config
    vocabulary = config.model_config.get_vocab_size()
    # A hybrid's blocks hold tokens or states, so their number does not tell how many tokens fit.
    rows = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    stored = NAMES.get(asked.kv_cache_dtype, asked.kv_cache_dtype)
    rounds: list[dict[str, object]] = []
    found = {
        **_facts(),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "rounds": rounds,
    }
    for load in asked.load:
        requests, input_tokens, output_tokens = _parse(load)
        _run(llm, min(requests, 8), input_tokens, 4, vocabulary, seed=0)  # warm-up
        seconds = [
            _run(llm, requests, input_tokens, output_tokens, vocabulary, seed=repeat + 1)
            for repeat in range(asked.repeats)
        ]
        rounds.append(
            {
                "stored": stored,
                "load": load,
                "seconds": seconds,
                "capacity_tokens": None if config.model_config.is_hybrid else rows,
                "start_seconds": ready,
            }
        )
        rate = requests * output_tokens / min(seconds)
        print(f"vLLM {stored} {load}: {rate:.0f} out tok/s, {seconds}", flush=True)
        if asked.out:  # after every load, so that what was measured is kept
            with open(asked.out, "w", encoding="utf-8") as out:
                out.write(json.dumps(found, indent=1) + "\n")


def _parse(load: str) -> tuple[int, int, int]:
    requests, _, lengths = load.partition("x")
    before, _, after = lengths.partition("/")
    return int(requests), int(before), int(after)


def _run(
    llm: Any, requests: int, input_tokens: int, output_tokens: int, vocabulary: int, *, seed: int
) -> float:
    """Returns seconds for all requests, submitted at once."""
    from vllm import SamplingParams

    numbers = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [numbers.randrange(vocabulary) for _ in range(input_tokens)]}
        for _ in range(requests)
    ]
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=output_tokens, detokenize=False
    )
    start = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(one.outputs[0].token_ids) == output_tokens for one in answers)
    return seconds


def _facts() -> dict[str, object]:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    packages = ("vllm", "torch", "triton", "transformers")
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.vllm", *sys.argv[1:]]),
        "gpu": gpu,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


if __name__ == "__main__":
    main()
