"""Tokens per second of the engine itself, without a server: all requests of a load are submitted at once.

Every request has different random tokens and gets exactly the asked number of tokens; end-of-sequence
tokens do not end it.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from itertools import product
from types import MappingProxyType

from kvant.attention.need import DeviceKind
from kvant.engine.llm import LLM
from kvant.engine.result import Result
from kvant.errors import BadValue, WayOut
from kvant.kv.groups import sequences_that_fit
from kvant.kv.memory import SCRATCH_PAGES
from kvant.kv.names import parse_format
from kvant.kv.request import Asked
from kvant.plan.config import EngineConfig
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason

GREEDY: Mapping[str, SamplingParams] = MappingProxyType({"greedy": SamplingParams(temperature=0.0)})
"""The default way to sample."""


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` requests with `input` tokens each, answered with `output` tokens each."""

    requests: int
    input: int
    output: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.input}/{self.output}"


@dataclass(frozen=True, slots=True)
class Round:
    """Results of one format under one load. seconds: per repeat. steps: of the last repeat.

    capacity_tokens: see `pool_tokens`. start_seconds: until the engine was ready. sampling: as asked, else
    "greedy". limit: output tokens per second if steps only decoded and each took as long as
    reading its bytes (`step_bytes`) at the GPU's read bandwidth; None on a CPU.
    """

    stored: str
    load: Load
    sampling: str
    seconds: tuple[float, ...]
    steps: int
    preemptions: int
    capacity_tokens: int
    start_seconds: float
    limit: float | None

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens per second of the fastest repeat, since disturbances only slow a run."""
        return self.load.requests * self.load.output / min(self.seconds)


def parse_load(text: str) -> Load:
    """Parses `32x128/256`: 32 requests of 128 tokens, each answered with 256.

    Raises BadValue for anything else.
    """
    try:
        requests, _, lengths = text.partition("x")
        before, _, after = lengths.partition("/")
        load = Load(int(requests), int(before), int(after))
    except ValueError:
        load = Load(0, 0, 0)
    if min(load.requests, load.input, load.output) < 1:
        raise BadValue(
            f"--load {text} is no load",
            why="it is REQUESTSxINPUT/OUTPUT in whole numbers from 1, such as 32x128/256",
        )
    return load


def parse_sampling(text: str) -> SamplingParams:
    """Parses `{"temperature":0.6,"top_p":0.95}`.

    Raises BadValue if it is not a JSON object or names an unknown parameter, and RequestError for a value
    that a request cannot have.
    """
    try:
        asked = json.loads(text)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise BadValue(
            f"--sampling {text} is no JSON object",
            why='it names sampling parameters, such as {"temperature":0.6,"top_k":20,"top_p":0.95}',
        )
    unknown = asked.keys() - {field.name for field in dataclass_fields(SamplingParams)}
    if unknown:
        raise BadValue(f"--sampling {text}: no such parameter: {', '.join(sorted(unknown))}")
    return SamplingParams(**asked)


def measure(
    config: EngineConfig,
    formats: list[str],
    loads: list[Load],
    repeats: int,
    samplings: Mapping[str, SamplingParams] = GREEDY,
) -> Iterator[Round]:
    """Measures each format on a new engine: every load `repeats` times with each named sampling."""
    bandwidth = _read_bandwidth(config)
    for name in formats:
        asked = Asked(parse_format(name, asked_by="--kv-format"), f"--kv-format {name}")
        requests = config.plan.requests
        wanted = replace(requests, target=replace(requests.target, explicit=(asked,)))
        start = time.perf_counter()
        llm = LLM.from_config(replace(config, plan=replace(config.plan, requests=wanted)))
        ready = time.perf_counter() - start
        for load in loads:
            _check_length(llm, load)
        for load, (sampling, params) in product(loads, samplings.items()):
            warm_up = replace(load, requests=min(load.requests, 8), output=min(load.output, 4))
            run_load(llm, warm_up, params, seed=0)
            runs = [run_load(llm, load, params, seed=repeat + 1) for repeat in range(repeats)]
            yield Round(
                ", ".join(llm.plan.formats),
                load,
                sampling,
                tuple(run[0] for run in runs),
                runs[-1][1],
                runs[-1][2],
                pool_tokens(llm, load.input + load.output),
                ready,
                None if bandwidth is None else decode_limit(llm, load, bandwidth),
            )
        del llm
        free_memory()


def pool_tokens(llm: LLM, length: int) -> int:
    """Returns the tokens that the pool holds in sequences of `length` tokens each.

    If every layer keeps every token, the length does not matter, and tokens fill all pages. Else only whole
    sequences count, because a window's pages or a state are the same for a short or a long one.
    """
    pages, layout = llm.engine.stats.num_usable_pages, llm.planned.layout
    if layout is None:
        return pages * llm.plan.page_size
    piece = llm.engine.limits.max_num_batched_tokens
    return sequences_that_fit(layout, pages + SCRATCH_PAGES, length, piece) * length


def _read_bandwidth(config: EngineConfig) -> float | None:
    """Returns bytes per second at which the engine's GPU reads its memory; None for a CPU."""
    if config.plan.device.kind is DeviceKind.CPU:
        return None
    from kvant.measure.read_bandwidth import read_bandwidth

    found = read_bandwidth(sys.modules["torch"].device("cuda")) * 1e12
    free_memory()
    return found


def step_bytes(llm: LLM, num_sequences: int, length: int) -> int:
    """Returns the bytes that one rank reads and writes in a decode step.

    They are the weights it uses, keys and values in every sequence's windows, and states twice. length:
    tokens of each of `num_sequences` sequences.
    """
    kept = sum(
        group.bytes_per_token * min(length, group.window or length) for group in llm.planned.groups
    )
    from kvant.measure.own_engine import runner_of

    whole, rank = llm.plan, llm.planned.rank_kv
    kept = (
        kept * rank.bytes_per_token // max(1, whole.bytes_per_token) + 2 * rank.bytes_per_sequence
    )
    runner = runner_of(llm)
    return runner.model.weight_bytes_of_step(num_sequences) + num_sequences * kept


def decode_limit(llm: LLM, load: Load, bandwidth: float) -> float:
    """Returns the output tokens per second of `load` if steps only read their bytes.

    bandwidth: bytes per second. Prompts are free, and a sequence has its input and half of its output.
    """
    together = min(load.requests, llm.engine.limits.max_num_seqs)
    return together * bandwidth / step_bytes(llm, together, load.input + load.output // 2)


def free_memory() -> None:
    """Returns the memory of a deleted engine to the device, because the next engine asks how much is free."""
    gc.collect()
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_length(llm: LLM, load: Load) -> None:
    longest = llm.engine.limits.max_model_len
    if load.input + load.output > longest:
        raise BadValue(
            f"--load {load.requests}x{load.input}/{load.output} is longer than a sequence may be here",
            why=f"that is {longest} tokens (--max-model-len, and what the pool holds)",
            ways_out=(WayOut(f"take loads of at most {longest} tokens, or more memory for them"),),
        )


def run_load(llm: LLM, load: Load, params: SamplingParams, *, seed: int) -> tuple[float, int, int]:
    """Submits all requests and steps until none is left; returns seconds, steps and preemptions.

    params: without the length of answers. Raises BadValue if answers cannot be as long as the load says, and
    for a request that failed.
    """
    engine = llm.engine
    _check_length(llm, load)
    numbers = random.Random(seed)
    params = replace(params, max_tokens=load.output, ignore_eos=True)
    prompts = [
        [numbers.randrange(engine.vocab_size) for _ in range(load.input)]
        for _ in range(load.requests)
    ]
    before = engine.stats
    start = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, params)
    results = []
    while engine.has_work:
        results += [piece.result for piece in engine.step() if piece.result is not None]
    seconds = time.perf_counter() - start
    for result in results:
        _check(result, load)
    assert len(results) == load.requests
    after = engine.stats
    return (
        seconds,
        after.num_steps - before.num_steps,
        after.num_preemptions - before.num_preemptions,
    )


def _check(result: Result, load: Load) -> None:
    """Raises BadValue unless the request was answered with as many tokens as the load says."""
    if len(result.token_ids) == load.output and result.finish_reason is FinishReason.LENGTH:
        return
    why = f"it ended with {str(result.finish_reason)!r}"
    if result.finish_reason is FinishReason.NUMERICAL_ERROR:
        why = "its logits were NaN or infinite, so its times would mean nothing"
    elif result.error is not None:
        why = f"it was refused: {result.error}"
    raise BadValue(
        f"--load {load}: a request ended after {len(result.token_ids)} of {load.output} tokens",
        why=why,
    )


def table(rounds: list[Round]) -> str:
    """Formats Markdown: tokens per second of the fastest repeat, and its share of the bandwidth limit."""
    lines = [
        "| load | sampling | KV cache | out tok/s | of the limit | seconds | all repeats "
        "| capacity, tokens | ready in |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for found in sorted(rounds, key=lambda r: (r.load.input, r.load.requests)):
        repeats = ", ".join(f"{seconds:.2f}" for seconds in found.seconds)
        rate = found.output_tokens_per_second
        share = "-" if found.limit is None else f"{rate / found.limit:.0%} of {found.limit:.0f}"
        lines.append(
            f"| {found.load} | {found.sampling} | {found.stored} | {rate:.0f} | {share} "
            f"| {min(found.seconds):.2f} | {repeats} | {found.capacity_tokens} "
            f"| {found.start_seconds:.1f} s |"
        )
    return "\n".join(lines)
