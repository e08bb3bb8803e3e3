"""Tokens a second of the engine itself, without a server: so many requests, so long, all at once.

    python -m kvant.measure.throughput MODEL --requests 32 --input 128 --output 256 --random-weights

Every request brings random tokens of its own and answers exactly `--output` tokens. A first round of
the same shape warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvant.engine.config import ENGINE_OPTIONS, engine_config
from kvant.engine.llm import LLM
from kvant.engine.sampling_params import SamplingParams
from kvant.engine.settings import read_settings


@dataclass(frozen=True, slots=True)
class Load:
    """requests of input tokens each, answered with output tokens each."""

    requests: int
    input: int
    output: int


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round, of its steps in total, and their number."""

    seconds: float
    steps: int
    preemptions: int
    output_tokens_per_second: float
    total_tokens_per_second: float


def run_load(llm: LLM, load: Load, *, seed: int) -> Round:
    """Submit everything, step until nothing is left."""
    engine = llm.engine
    numbers = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    for _ in range(load.requests):
        prompt = [numbers.randrange(10, engine.vocab_size) for _ in range(load.input)]
        engine.submit(prompt, params)
    before = engine.stats
    start = time.perf_counter()
    tokens = 0
    while engine.has_work:
        for piece in engine.step():
            tokens += len(piece.token_ids)
    seconds = time.perf_counter() - start
    assert tokens == load.requests * load.output
    after = engine.stats
    return Round(
        seconds,
        after.num_steps - before.num_steps,
        after.num_preemptions - before.num_preemptions,
        tokens / seconds,
        (tokens + load.requests * load.input) / seconds,
    )


def make_llm(arguments: argparse.Namespace) -> LLM:
    names = (
        "model", "kv_cache_dtype", "kv_cache_memory", "page_size", "device", "max_model_len",
        "max_num_seqs", "max_num_batched_tokens",
    )  # fmt: skip
    given: dict[str, object] = {name: getattr(arguments, name) for name in names}
    given |= {"kv_missing_scales": "one", "enable_prefix_caching": False, "seed": 0}
    settings = read_settings(ENGINE_OPTIONS, given=given, by=lambda option: option.flag, environ={})
    return LLM.from_config(engine_config(settings, random_weights=arguments.random_weights))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, action="append")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--kv-cache-memory")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    start = time.perf_counter()
    llm = make_llm(arguments)
    loaded = time.perf_counter() - start
    print(
        f"loaded in {loaded:.1f} s; {llm.plan.layers[0].backend}; {' '.join(llm.notes)}", flush=True
    )
    found = []
    for requests in arguments.requests or [32]:
        load = Load(requests, arguments.input, arguments.output)
        run_load(llm, load, seed=0)
        for repeat in range(arguments.repeats):
            result = run_load(llm, load, seed=repeat + 1)
            print(
                f"{requests} x {load.input}/{load.output}: {result.output_tokens_per_second:.0f} out tok/s, "
                f"{result.seconds:.2f} s, {1e3 * result.seconds / result.steps:.2f} ms a step",
                flush=True,
            )
            found.append({**asdict(load), **asdict(result)})
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"loaded_s": loaded, "rounds": found}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
