"""Compares greedy answers of the engine's own loop to the same prompts, run in several ways.

Up to the first different token, two ways read the same text. So every answer is compared up to there,
and an answer with a different token counts as one flip.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch

from kvant.engine.engine import Engine
from kvant.engine.llm import LLM
from kvant.errors import BadValue, UnknownName
from kvant.execution.runner import ModelRunner
from kvant.kv.names import FormatRequest
from kvant.kv.spec import KVPlan
from kvant.measure.fidelity import passage
from kvant.measure.own_engine import engine_over, plan_storing, runner_of
from kvant.sampling.sampling_params import SamplingParams

NUM_PROMPTS = 32
_LONGEST = 128
_STEP_TOKENS = 2048


class Way(Enum):
    """How prompts are run. CUDA graphs exist on GPUs only."""

    ALONE = "alone"
    BATCH = "batch"
    UNRECORDED = "unrecorded"
    """A batch whose steps are launched kernel by kernel."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one run. tokens: of every answer. backend: of the first layer."""

    format: str
    backend: str
    dtype: str
    batch_invariant: bool
    way: str
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """One way's answers compared with those of another, `beside`, for the same format, dtype and mode.

    positions: tokens that both computed after the same text. flips: how many of these differ.
    """

    format: str
    dtype: str
    batch_invariant: bool
    way: str
    beside: str
    positions: int
    flips: int


def parse_way(name: str) -> Way:
    """Returns the way with this value. Raises UnknownName for anything else."""
    try:
        return Way(name)
    except ValueError:
        raise UnknownName("way", name, [way.value for way in Way], asked_by="--way") from None


def read_answers(path: Path) -> list[Answers]:
    """Reads the answers in the JSON of an earlier measurement. Raises BadValue if there are none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["answers"]
        return [Answers(**{**row, "tokens": tuple(map(tuple, row["tokens"]))}) for row in found]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise BadValue(f"{path} holds no answers", why=str(fault)) from fault


def ways_on(device: torch.device) -> list[Way]:
    """Returns the ways that differ on this device."""
    return [Way.ALONE, Way.BATCH] if device.type == "cpu" else list(Way)


def prompts_of(llm: LLM) -> list[tuple[list[int], int]]:
    """Returns pieces of the bundled text, 16 to 44 tokens each, and the lengths of their answers, 24 to 52.

    So fewer and fewer sequences run side by side, and steps in CUDA graphs are padded.
    """
    text = llm.encode(passage())
    assert len(text) >= 16 * (NUM_PROMPTS + 2)
    return [
        (list(text[16 * i : 16 * i + 16 + 5 * i % 29]), 24 + 11 * i % 29)
        for i in range(NUM_PROMPTS)
    ]


def answer(llm: LLM, stored: FormatRequest, ways: Sequence[Way]) -> Iterator[Answers]:
    """Answers the same prompts in each way, with the KV cache in `stored`."""
    runner = runner_of(llm)
    plan, prompts = plan_storing(llm, stored), prompts_of(llm)
    engines: dict[bool, Engine] = {}
    for way in ways:
        recorded = way is not Way.UNRECORDED
        if recorded not in engines:
            engines[recorded] = _engine(llm, plan, recorded=recorded)
        engine = engines[recorded]
        groups = [[one] for one in prompts] if way is Way.ALONE else [prompts]
        tokens = [found for group in groups for found in _run(engine, group)]
        yield Answers(
            str(stored),
            plan.layers[0].backend or "",
            str(runner.model.dtype).removeprefix("torch."),
            runner.model.batch_invariant,
            way.value,
            tuple(tokens),
        )


def compare_all(own: Sequence[Answers], others: Sequence[Answers] = ()) -> Iterator[Agreement]:
    """Compares every way with earlier ways on the same engine, and with answers of other runs.

    Those have its format and dtype, in either mode.
    """
    before: dict[tuple[str, str, bool], list[Answers]] = {}
    for one in own:
        earlier = before.setdefault((one.format, one.dtype, one.batch_invariant), [])
        for other in earlier:
            yield compare(one, other)
        for other in others:
            if (other.format, other.dtype) == (one.format, one.dtype):
                yield replace(compare(one, other), beside=f"elsewhere, {other.way}")
        earlier.append(one)


def compare(one: Answers, other: Answers) -> Agreement:
    """Compares answers up to their first different token."""
    positions = flips = 0
    for a, b in zip(one.tokens, other.tokens, strict=True):
        parts = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        positions += len(a) if parts is None else parts + 1
        flips += parts is not None
    return Agreement(
        one.format, one.dtype, one.batch_invariant, one.way, other.way, positions, flips
    )


def _engine(llm: LLM, plan: KVPlan, *, recorded: bool) -> Engine:
    inner = runner_of(llm)
    num_pages = 1 + NUM_PROMPTS * -(-_LONGEST // plan.page_size)
    runner = ModelRunner(inner.model, num_pages, plan)
    if recorded:
        runner.capture(NUM_PROMPTS, _STEP_TOKENS, _LONGEST)
    return engine_over(
        llm,
        runner,
        plan,
        num_pages,
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=_STEP_TOKENS,
        max_model_len=_LONGEST,
    )


def _run(engine: Engine, prompts: Sequence[tuple[list[int], int]]) -> list[tuple[int, ...]]:
    """Runs all prompts at once; returns answers in the order of prompts."""
    numbers = [
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
        for prompt, count in prompts
    ]
    found: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        for piece in engine.step():
            if piece.result is not None:
                found[piece.number] = piece.result.token_ids
    return [found[number] for number in numbers]
