"""Gain and cost of batch-invariant mode: argmaxes that flip without it, and tokens/s with and without.

A flip: after the same text, read one token per step or eight tokens per step, the most likely next token
differs. Both read the same stored formats. Only the shapes of the products differ, and with them
the rounding, which a quantised cache amplifies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvant.engine.llm import LLM
from kvant.execution.runner import ModelRunner
from kvant.kv.names import FormatRequest
from kvant.kv.spec import KVPlan
from kvant.measure.own_engine import engine_over, plan_storing, runner_of
from kvant.measure.teacher_forced import text_logits
from kvant.sampling.sampling_params import SamplingParams

ROWS = 8
_PROMPT = 16
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Flips:
    """Argmaxes that differ between steps of one row and of eight, over `positions` of one text.

    most: the largest difference of a logit. backend: of the first layer.
    """

    format: str
    backend: str
    batch_invariant: bool
    positions: int
    flips: int
    most: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoding speed: tokens per second of all `batch` requests together, without prompts."""

    format: str
    backend: str
    batch_invariant: bool
    batch: int
    tokens_per_second: float


def count_flips(llm: LLM, format: FormatRequest, token_ids: Sequence[int]) -> Flips:
    """Reads the text twice, with the KV cache in `format`."""
    plan = plan_storing(llm, format)
    model = runner_of(llm).model
    one, eight = (text_logits(model, plan, token_ids, chunk=rows) for rows in (1, ROWS))
    return Flips(
        str(format),
        _backend(plan),
        model.batch_invariant,
        len(token_ids),
        int((one.argmax(-1) != eight.argmax(-1)).sum()),
        _largest(one - eight),
    )


def decode_speed(llm: LLM, format: FormatRequest, batch: int, num_tokens: int) -> Speed:
    """Runs the engine's own loop, greedy, with `batch` requests side by side."""
    plan = plan_storing(llm, format)
    model = runner_of(llm).model
    length = _PROMPT + _WARM_UP + num_tokens + 1
    max_model_len = -(-length // plan.page_size) * plan.page_size
    num_pages = 1 + batch * max_model_len // plan.page_size
    step_tokens = max(512, batch)
    runner = ModelRunner(model, num_pages, plan)
    runner.capture(batch, step_tokens, max_model_len)
    engine = engine_over(
        llm,
        runner,
        plan,
        num_pages,
        max_num_seqs=batch,
        max_num_batched_tokens=step_tokens,
        max_model_len=max_model_len,
    )
    params = SamplingParams(temperature=0.0, max_tokens=_WARM_UP + num_tokens + 1, ignore_eos=True)
    for number in range(batch):
        engine.submit([3 + number + 7 * i for i in range(_PROMPT)], params)
    for _ in range(1 + _WARM_UP):
        engine.step()
    started = time.perf_counter()
    for _ in range(num_tokens):
        engine.step()
    seconds = time.perf_counter() - started
    assert not engine.has_work, "every request answered as many tokens as were counted"
    return Speed(
        str(format), _backend(plan), model.batch_invariant, batch, batch * num_tokens / seconds
    )


def _backend(plan: KVPlan) -> str:
    return plan.layers[0].backend or ""


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())
