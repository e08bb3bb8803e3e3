"""Decode steps of many long sequences, whose speed depends on the bytes of the KV format.

Prompts are not computed, except for one short prompt, whose pages are copied over all others, so that steps
read real keys and values everywhere. Then every sequence gets one token per step, through the engine's own
loop, with CUDA graphs on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.device_idle import LONG_GAP_US, Idle
from benchmarks.engine_timing import Case, Timing, steps_of, time_engine
from benchmarks.peers.filled import SAMPLE_TOKENS, FilledRunner, compute_sample
from kvant.engine.engine import Engine
from kvant.engine.llm import LLM
from kvant.errors import BadValue, WayOut
from kvant.execution.runner import ModelRunner
from kvant.kv.names import parse_format
from kvant.kv.pages import SCRATCH
from kvant.kv.request import Asked, KVRequest, parse_rule
from kvant.measure.own_engine import engine_over, runner_of
from kvant.measure.throughput import free_memory
from kvant.plan.resolution import resolve_again

_STEP_TOKENS = 65536
_WARM_UP_TOKENS = 64
"""Maximum length of prompts that run: larger shapes need not be prepared."""
_MARGIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Steady:
    """stored: the format as asked.

    bytes_per_token: of all layers. backends: of the layers, without repetition.
    """

    stored: str
    bytes_per_token: int
    backends: tuple[str, ...]
    timing: Timing


def parse_stored(text: str) -> KVRequest:
    """Parses `fp8`, or a format with rules: `fp8;0-17:bfloat16`. Raises ConfigError for anything else."""
    name, *rules = text.split(";")
    asked_by = f"--kv-format {text}"
    found = KVRequest(explicit=(Asked(parse_format(name, asked_by=asked_by), asked_by),))
    for rule in rules:
        found = found.merged(parse_rule(rule, asked_by=asked_by).target)
    return found


def steady_decode(
    llm: LLM, stored: Sequence[str], *, batch: int, context: int, steps: int, profiled: int = 0
) -> Iterator[Steady]:
    """Measures each format on a separate pool over the weights of `llm`.

    profiled: steps after the timed ones, see `measure_idle`. Raises BadValue for sequences that would be
    longer than the model's positions reach.
    """
    # Sequences that are admitted first advance one token per step while others are admitted.
    tokens = context + -(-batch * context // _STEP_TOKENS) + steps_of(steps, profiled)
    longest = llm.planned.target.geometry.max_model_len
    if longest is not None and tokens > longest:
        raise BadValue(
            f"--context {context} is too long for this model",
            why=f"with the steps that follow its sequences have {tokens} tokens, and its positions end at "
            f"{longest}",
            ways_out=(WayOut(f"take contexts of at most {longest - tokens + context} tokens"),),
        )
    for text in stored:
        engine, made = _engine(llm, parse_stored(text), batch, max(tokens, SAMPLE_TOKENS))
        case = Case(True, batch, context)
        (timing,) = time_engine(engine, [case], repeats=steps, profiled=profiled)
        plan = made.pool.plan
        backends = {layer.backend for layer in plan.layers if layer.backend is not None}
        found = Steady(text, plan.bytes_per_token, tuple(sorted(backends)), timing)
        del engine, made
        free_memory()
        yield found


def _engine(llm: LLM, asked: KVRequest, batch: int, tokens: int) -> tuple[Engine, ModelRunner]:
    inner = runner_of(llm)
    plan = resolve_again(llm.planned, asked)
    pages = -(-(tokens + _MARGIN_TOKENS) // plan.page_size)
    num_pages = SCRATCH + 1 + batch * pages
    own = ModelRunner(inner.model, num_pages, plan)
    own.capture(batch, _WARM_UP_TOKENS, pages * plan.page_size)
    runner = FilledRunner(own, llm.engine.vocab_size)
    engine = engine_over(
        llm,
        runner,
        plan,
        num_pages,
        max_num_seqs=batch,
        max_num_batched_tokens=_STEP_TOKENS,
        max_model_len=pages * plan.page_size,
    )
    compute_sample(engine)
    runner.fill()
    return engine, own


def table(found: Sequence[Steady]) -> str:
    """Formats Markdown; others are compared with the first format."""
    lines = [
        "| KV cache | backend | bytes a token | ms a step, median | tokens/s | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        timing = one.timing
        lines.append(
            f"| {one.stored} | {', '.join(one.backends)} | {one.bytes_per_token} "
            f"| {timing.median_ms:.3f} | {timing.tokens_per_second:.0f} "
            f"| {found[0].timing.median_ms / timing.median_ms:.2f} |"
        )
    if any(one.timing.idle is not None for one in found):
        lines += ["", *_idle_lines(found)]
    return "\n".join(lines)


def _idle_lines(found: Sequence[Steady]) -> list[str]:
    lines = [
        f"| KV cache | device idle | of all, in gaps from {LONG_GAP_US:g} us | longest gap, us "
        "| ms a step, busy | profiled | not profiled |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        idle = one.timing.idle
        cells = ["not measured", "-", "-", "-", "-"]
        if isinstance(idle, Idle):
            cells = [
                f"{100 * idle.share:.2f} %", f"{100 * idle.long_share:.2f} %",
                f"{idle.longest_gap_us:.1f}", f"{idle.busy_ms:.3f}", f"{idle.wall_ms:.3f}",
            ]  # fmt: skip
        lines.append(f"| {one.stored} | {' | '.join(cells)} | {one.timing.median_ms:.3f} |")
    return lines
