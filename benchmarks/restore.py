"""`python -m benchmarks.restore`: a long prompt, computed and restored from host memory."""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.configured import configured
from kvant.cli.output import OutFile, write_json
from kvant.errors import BadValue
from kvant.plan.config import EngineOptions, engine_config
from kvant.plan.settings import Settings

if TYPE_CHECKING:
    from kvant.engine.engine import Engine

_BUS_BYTES = 1 << 30
_NUM_SLOWEST = 12
_PLAIN_STEPS = 30
"""Steps of running answers alone before each restore, about as many as a restore takes."""


@configured(EngineOptions, model="--model -m", without=("seed",))
def restore(
    settings: Settings,
    context: Annotated[int, typer.Option("--context", min=64, help="Tokens of a prompt.")] = 32768,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Prompts.")] = 3,
    streams: Annotated[
        int, typer.Option("--streams", min=0, help="Answers that run beside restores.")
    ] = 32,
    restores: Annotated[
        int, typer.Option("--restores", min=1, help="Restores beside running answers.")
    ] = 20,
    out: OutFile = None,
) -> None:
    """Time to the first token of a prompt that is computed, and of one that comes back from a tier.

    Between both, the prefix cache forgets the pages, as an eviction does. Gaps are times between two steps
    of running answers, without restores and from the arrival of a restored request to its first token.
    """
    from kvant.engine.build import build_engine
    from kvant.measure.facts import command_line, measurement_facts

    config = engine_config(settings)
    if config.plan.offload is None:
        raise BadValue("nothing is restored without tiers", why="give --kv-offload host:SIZE")
    built = build_engine(config)
    engine = built.engine
    assert engine.tiers is not None
    _first_token(engine, _prompt(99, 256))  # compiles what is not compiled yet
    cold, warm, stored = [], [], []
    for number in range(repeats):
        cold.append(_first_token(engine, _prompt(number, context)))
        stored.append(_settle(engine))
        engine.scheduler.allocator.forget_all()
        _first_token(engine, _prompt(50 + number, 64))
        warm.append(_first_token(engine, _prompt(number, context)))
        sys.stderr.write(f"{cold[-1]:.3f} s computed, {warm[-1]:.3f} s restored\n")
    stats = engine.stats.offload
    assert stats is not None
    found: dict[str, object] = {
        "context": context,
        "formats": built.kv.formats,
        "bytes_per_token": built.kv.bytes_per_token,
        "computed_seconds": cold,
        "restored_seconds": warm,
        "ratio": statistics.median(warm) / statistics.median(cold),
        "store_seconds_after_the_answer": stored,
        "restored_tokens": stats.num_restored_tokens,
        "bad": stats.host.bad,
        "restore_bytes_per_second": stats.host_bytes_per_second,
        "bus_bytes_per_second": _bus(),
    }
    if streams:
        found["gaps"] = _gaps(engine, streams, restores, context)
    for name, value in found.items():
        sys.stdout.write(f"{name}: {value}\n")
    if out is not None:
        facts = measurement_facts(
            command_line("python -m benchmarks.restore"), ["torch", "transformers"]
        )
        write_json(out, {**facts, **found})


def _prompt(number: int, count: int) -> list[int]:
    return [(31 * number + 7 * i * i + i) % 100 + 5 for i in range(count)]


def _first_token(engine: Engine, prompt: list[int]) -> float:
    """Returns seconds from the arrival of a request to its first token."""
    from kvant.sampling.sampling_params import SamplingParams

    started = time.perf_counter()
    engine.submit(prompt, SamplingParams(temperature=0, max_tokens=1))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def _settle(engine: Engine) -> float:
    started = time.perf_counter()
    while engine.is_moving:
        engine.move(0.001)
    return time.perf_counter() - started


def _gaps(engine: Engine, streams: int, restores: int, context: int) -> dict[str, object]:
    """Returns seconds between the tokens of running answers, with and without restores at the same time.

    Steps without restores run before each restore, since steps take longer as answers grow.
    slowest: the longest ones during restores, each with its step since the request's arrival.
    slowest_of_each: of each restore, and of each request whose pages the device still had.
    """
    from kvant.engine.process import search_rarely
    from kvant.sampling.sampling_params import SamplingParams

    longest = min(4096, engine.limits.max_model_len - 64)
    for number in range(streams):
        params = SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True)
        engine.submit(_prompt(200 + number, 32), params)
    for _ in range(50):
        engine.step()
    _settle(engine)
    search_rarely()  # as in a server's engine process

    def plainly() -> list[float]:
        found = []
        for _ in range(_PLAIN_STEPS):
            started = time.perf_counter()
            engine.step()
            found.append(time.perf_counter() - started)
        return found

    def steps() -> list[float]:
        found = []
        number = engine.submit(_prompt(0, context), SamplingParams(temperature=0, max_tokens=1))
        while number in engine.numbers:
            started = time.perf_counter()
            engine.step()
            found.append(time.perf_counter() - started)
        return found

    plain: list[float] = []
    beside: list[float] = []
    slowest: list[tuple[float, int]] = []
    most: dict[str, list[float]] = {"restored": [], "on_device": []}
    for _ in range(restores):
        engine.scheduler.allocator.forget_all()
        plain += plainly()
        found = steps()
        beside += found
        most["restored"].append(max(found))
        slowest += [(seconds, place) for place, seconds in enumerate(found)]
        slowest = sorted(slowest, reverse=True)[:_NUM_SLOWEST]
        most["on_device"].append(max(steps()))
    for number in engine.numbers:
        engine.cancel(number)
    stats = engine.stats.offload
    assert stats is not None
    return {
        "streams": streams,
        "without": _summary(plain),
        "beside_restores": _summary(beside),
        "slowest": slowest,
        "slowest_of_each": most,
        "steps_a_restore": len(beside) / restores,
        "restored_tokens": stats.num_restored_tokens,
        "p99_ratio": _summary(beside)["p99"] / _summary(plain)["p99"],
    }


def _summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "most": ordered[-1],
    }


def _bus() -> float | None:
    """Returns bytes per second of large copies from pinned host memory to the GPU; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(_BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_BUS_BYTES, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, _BUS_BYTES / (time.perf_counter() - started))
    return best


if __name__ == "__main__":
    run_command(restore)
