"""Greedy answers of the engine's own loop to the same prompts, run in several ways: where do they part?

Up to the first token that differs both ways read the same text. So every answer is compared up to there,
and an answer that parts is one flip.
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
    """How prompts are run. Only a GPU records steps, as CUDA graphs."""

    ALONE = "alone"
    BATCH = "batch"
    UNRECORDED = "unrecorded"
    """A batch whose steps are launched kernel by kernel."""


@dataclass(frozen=True, slots=True)
class Answers:
    """tokens: of every answer. backend: of the first layer."""

    format: str
    backend: str
    dtype: str
    batch_invariant: bool
    way: str
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Answers of one way and of another, `beside`, with the same format, dtype and mode.

    positions: tokens of both with the same text before them. flips: how many of these differ.
    """

    format: str
    dtype: str
    batch_invariant: bool
    way: str
    beside: str
    positions: int
    flips: int


def parse_way(name: str) -> Way:
    """By its value. UnknownName for anything else."""
    try:
        return Way(name)
    except ValueError:
        raise UnknownName("way", name, [way.value for way in Way], asked_by="--way") from None


def read_answers(path: Path) -> list[Answers]:
    """Those in the JSON of an earlier measurement. BadValue where there are none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["answers"]
        return [Answers(**{**row, "tokens": tuple(map(tuple, row["tokens"]))}) for row in found]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise BadValue(f"{path} holds no answers", why=str(fault)) from fault


def ways_on(device: torch.device) -> list[Way]:
    """All that differ there."""
    return [Way.ALONE, Way.BATCH] if device.type == "cpu" else list(Way)


def prompts_of(llm: LLM) -> list[tuple[list[int], int]]:
    """Pieces of the bundled text, 16 to 44 tokens each, and how many tokens to answer with: 24 to 52, so
    that ever fewer answer side by side, and recorded steps are padded.
    """
    text = llm.encode(passage())
    assert len(text) >= 16 * (NUM_PROMPTS + 2)
    return [
        (list(text[16 * i : 16 * i + 16 + 5 * i % 29]), 24 + 11 * i % 29)
        for i in range(NUM_PROMPTS)
    ]


def answer(llm: LLM, stored: FormatRequest, ways: Sequence[Way]) -> Iterator[Answers]:
    """The same prompts in each way, with the KV cache in `stored`."""
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
    """Every way with those before it on the same engine, and with others' of its format and dtype, made
    in either mode.
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
    """Answer by answer, up to where they part."""
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
    """All at once, in the order of the prompts."""
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
