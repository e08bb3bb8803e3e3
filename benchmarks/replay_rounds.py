"""Steady decoding with and without drafts, with replayed acceptance: see `benchmarks.replayed`.

All requests answer at once. The clock starts when each has its first tokens and every way of stepping has
run, and stops when the first request ends. Plain decoding and decoding with drafts take
turns in one process, each on a separate engine.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.long_context import fill, remember
from benchmarks.replayed import REPLAY
from kvant.engine.llm import LLM
from kvant.errors import DoesNotFit, WayOut
from kvant.kv.names import parse_format
from kvant.kv.pool import KVPool
from kvant.kv.request import Asked
from kvant.measure.own_engine import runner_of
from kvant.measure.throughput import free_memory
from kvant.plan.config import EngineConfig
from kvant.plan.speculative_config import SpeculativeConfig
from kvant.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Load:
    """requests at once, each with input tokens. warm_up: tokens of each before the clock
    starts. output: minimum tokens of each after that.
    """

    requests: int
    input: int
    output: int
    warm_up: int


@dataclass(frozen=True, slots=True)
class Timed:
    """One repeat. new: new tokens of all requests in `seconds`. steps: their number."""

    seconds: float
    new: int
    steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.new / self.seconds


@dataclass(frozen=True, slots=True)
class Found:
    """A load in one way. stored: the target's KV format. num_drafts: 0 for plain decoding.

    mean_length: tokens of a sequence in one step with drafts.
    """

    stored: str
    num_drafts: int
    adaptive: bool
    requests: int
    input: int
    repeats: tuple[Timed, ...]
    mean_length: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the median repeat."""
        found = sorted(one.tokens_per_second for one in self.repeats)
        return found[len(found) // 2]


def measure(
    config: EngineConfig,
    asked: SpeculativeConfig,
    formats: Sequence[str],
    loads: Sequence[Load],
    repeats: int,
    *,
    plain: bool,
    written: bool,
) -> Iterator[Found]:
    """Measures each format on separate engines. plain: also plain decoding, in turn. written: prompts are
    not run but written, see `benchmarks.long_context`.
    """
    for name in formats:
        format_ = Asked(parse_format(name, asked_by="--kv-format"), f"--kv-format {name}")
        requests = config.plan.requests
        target = replace(requests.target, explicit=(format_,))
        base = replace(config.plan, requests=replace(requests, target=target), speculative=None)
        drafted = replace(base, speculative=replace(asked, method=REPLAY))
        plans = [base, drafted] if plain else [drafted]
        yield from _measure(
            [replace(config, plan=plan) for plan in plans],
            name,
            loads,
            repeats,
            adaptive=asked.adaptive,
            written=written,
        )
        free_memory()


def _measure(
    configs: Sequence[EngineConfig],
    name: str,
    loads: Sequence[Load],
    repeats: int,
    *,
    adaptive: bool,
    written: bool,
) -> Iterator[Found]:
    """Measures one format. Its engines are freed at the end."""
    llms = []
    for config in configs:
        start = time.perf_counter()
        llms.append(LLM.from_config(config))
        for note in (*llms[-1].notes, f"ready in {time.perf_counter() - start:.1f} s"):
            sys.stderr.write(note + "\n")
    for llm in llms if written else ():
        fill(_pools(llm))
    for load in loads:
        timed: list[list[Timed]] = [[] for _ in llms]
        before = [llm.engine.stats.speculation for llm in llms]
        for repeat in range(repeats):
            for place, llm in list(enumerate(llms))[:: 1 if repeat % 2 == 0 else -1]:
                timed[place].append(_run(llm, load, seed=repeat, written=written))
        for llm, earlier, ran in zip(llms, before, timed, strict=True):
            stats = llm.engine.stats.speculation
            mean = 0.0
            if stats is not None and earlier is not None:
                mean = stats.since(earlier).mean_acceptance_length
            yield Found(
                name,
                llm.planned.num_speculative_tokens,
                adaptive,
                load.requests,
                load.input,
                tuple(ran),
                mean,
            )


def _run(llm: LLM, load: Load, *, seed: int, written: bool) -> Timed:
    """Runs requests without an end; cancels them when enough is measured."""
    engine = llm.engine
    numbers = random.Random(seed)
    limit = engine.limits.max_model_len - load.input
    params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
    engine.scheduler.allocator.forget_all()
    submitted = []
    for _ in range(load.requests):
        prompt = [numbers.randrange(engine.vocab_size) for _ in range(load.input)]
        submitted.append(engine.submit(prompt, params))
    if written:
        remember(engine)
    counts = dict.fromkeys(submitted, 0)
    _step_until(llm, counts, load.warm_up)
    steps, tokens = engine.stats.num_steps, sum(counts.values())
    start = time.perf_counter()
    _step_until(llm, counts, load.warm_up + load.output)
    seconds = time.perf_counter() - start
    found = Timed(seconds, sum(counts.values()) - tokens, engine.stats.num_steps - steps)
    for number in submitted:
        engine.cancel(number)
    return found


def _step_until(llm: LLM, counts: dict[int, int], least: int) -> None:
    """Steps until each request has `least` tokens. Raises DoesNotFit if one would have to end before."""
    while min(counts.values()) < least:
        for piece in llm.engine.step():
            if piece.result is not None:
                raise DoesNotFit(
                    "a request ended before all had the tokens that are timed",
                    why=f"a sequence may have {llm.engine.limits.max_model_len} tokens here",
                    ways_out=(WayOut("take a larger --max-model-len, or a smaller --output"),),
                )
            counts[piece.number] += len(piece.token_ids)


def _pools(llm: LLM) -> list[KVPool]:
    runner = runner_of(llm)
    return runner.pools


def table(found: Sequence[Found]) -> str:
    """Formats medians as Markdown."""
    lines = [
        "| KV cache | requests | context | drafts | tok/s | over plain | tokens a step | repeats, tok/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = {(f.stored, f.requests): f.tokens_per_second for f in found if not f.num_drafts}
    for one in found:
        beside = plain.get((one.stored, one.requests))
        drafts = f"up to {one.num_drafts}" if one.adaptive else str(one.num_drafts)
        ran = ", ".join(f"{timed.tokens_per_second:.0f}" for timed in one.repeats)
        lines.append(
            f"| {one.stored} | {one.requests} | {one.input} | {drafts if one.num_drafts else '-'} "
            f"| {one.tokens_per_second:.0f} "
            f"| {'' if beside is None else f'{one.tokens_per_second / beside:.2f}'} "
            f"| {one.mean_length:.2f} | {ran} |"
        )
    return "\n".join(lines)
