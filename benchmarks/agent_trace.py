"""`python -m benchmarks.agent_trace`: agents with growing prompts and a cache for some of them."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.configured import configured
from kvant.cli.output import OutFile, write_json
from kvant.kv.offload.config import OffloadConfig
from kvant.plan.config import EngineConfig, EngineOptions, engine_config
from kvant.plan.settings import Settings


@configured(EngineOptions, model="--model -m", without=("seed", "kv_offload", "kv_cache_memory"))
def agent_trace(
    settings: Settings,
    sessions: Annotated[int, typer.Option("--sessions", min=2, help="Agents.")] = 16,
    cached: Annotated[int, typer.Option("--cached", min=1, help="Whose pages fit at once.")] = 4,
    turns: Annotated[int, typer.Option("--turns", min=2, help="Turns of each agent.")] = 10,
    first: Annotated[
        int, typer.Option("--first", min=16, help="Tokens of a first prompt.")
    ] = 12000,
    more: Annotated[int, typer.Option("--more", min=16, help="Tokens that a turn adds.")] = 12000,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Tokens of an answer.")] = 64,
    out: OutFile = None,
) -> None:
    """Count tokens that are computed again, with a host tier and without one.

    The agents take turns in rounds. A turn's prompt is the conversation so far and new
    tokens. Tokens are computed again if an earlier turn of the agent had computed them.
    """
    from kvant.measure.facts import command_line, measurement_facts

    config = engine_config(settings)
    longest = first + turns * (more + answer) + answer
    rows = []
    for with_host in (False, True):
        rows.append(_run(config, with_host, sessions, cached, turns, first, more, answer, longest))
        sys.stdout.write(f"{rows[-1]}\n")
    ratio = rows[1]["again"] / max(1, rows[0]["again"])
    sys.stdout.write(f"computed again with the host tier over without: {ratio:.3f}\n")
    if out is not None:
        facts = measurement_facts(
            command_line("python -m benchmarks.agent_trace"), ["torch", "transformers"]
        )
        write_json(out, {**facts, "rows": rows, "ratio": ratio})


def _run(
    config: EngineConfig, with_host: bool, sessions: int, cached: int, turns: int, first: int,
    more: int, answer: int, longest: int,
) -> dict[str, int | float | bool]:  # fmt: skip
    from kvant.engine.build import build_engine, plan_engine
    from kvant.sampling.sampling_params import SamplingParams

    plan = replace(config.plan, max_model_len=longest, max_num_seqs=min(cached, 8))
    each = plan_engine(replace(config, plan=plan)).page_bytes // plan.page_size
    plan = replace(
        plan,
        kv_cache_bytes=cached * longest * each,
        offload=OffloadConfig(2 * sessions * longest * each) if with_host else None,
    )
    engine = build_engine(replace(config, plan=plan)).engine
    talks = [_tokens(number, first) for number in range(sessions)]
    known = [0] * sessions
    again = computed = 0
    started = time.perf_counter()
    for turn in range(turns):
        for number, talk in enumerate(talks):
            if turn:
                talk += _tokens(1000 * turn + number, more)
            before = engine.stats.num_computed_tokens
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            one = engine.submit(talk, params)
            result = None
            while engine.has_work:
                for progress in engine.step():
                    if progress.number == one and progress.result is not None:
                        result = progress.result
            assert result is not None
            spent = engine.stats.num_computed_tokens - before
            computed += spent
            # The newest token of an answer is never computed before the next turn.
            new = len(talk) + len(result.token_ids) - 1 - known[number]
            again += spent - new
            talk += result.token_ids
            known[number] = len(talk) - 1
    stats = engine.stats.offload
    return {
        "host_tier": with_host,
        "prompt_tokens": sum(known),
        "computed": computed,
        "again": again,
        "restored": 0 if stats is None else stats.num_restored_tokens,
        "seconds": round(time.perf_counter() - started, 2),
    }


def _tokens(seed: int, count: int) -> list[int]:
    return [(31 * seed + 7 * i * i + 3 * i) % 100 + 5 for i in range(count)]


if __name__ == "__main__":
    run_command(agent_trace)
