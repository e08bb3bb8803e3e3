"""Greedy decoding beside transformers' `generate` in one process, for the demo."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria, StoppingCriteriaList

from kvant.engine.llm import LLM
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest
from kvant.measure.own_engine import engine_storing, plan_storing
from kvant.models.locate import locate
from kvant.models.quiet import quiet_transformers
from kvant.models.stored import read_blocks
from kvant.sampling.sampling_params import SamplingParams

WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """One engine on one case. rounds: milliseconds of each decode step, by round.

    tokens: new tokens of one step, which is the number of sequences.
    """

    case: str
    engine: str
    weights: str
    kv: str
    tokens: int
    rounds: tuple[tuple[float, ...], ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second at the median of all steps."""
        return 1000 * self.tokens / statistics.median(ms for found in self.rounds for ms in found)


def beside_transformers(
    llm: LLM, batches: Sequence[int], *, context: int, steps: int, rounds: int
) -> list[Speed]:
    """Times `rounds` times `steps` decode steps of both engines, for each number of sequences.

    Both compute in float32 over a float32 cache, on torch's threads, with the same random prompts of
    `context` tokens. The engines take turns. `llm` must compute in float32. Its weights are loaded again for
    transformers, as float32 numbers if `llm` keeps the blocks of a GGUF file.
    """
    target = llm.planned.target
    in_blocks = read_blocks(target.config) is not None
    numbers_path = locate(target.local.name).path if in_blocks else llm.model_path
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(numbers_path), dtype=torch.float32, local_files_only=True
        )
    model.requires_grad_(False)
    ours = _own_decode(llm, max(batches), context, steps)

    def theirs(prompts: list[list[int]], repeats: int) -> list[float]:
        with quiet_transformers():
            return decode_transformers(model, torch.tensor(prompts), repeats)

    engines = {"transformers": theirs, "Kvant": ours}
    weights = {"transformers": "float32", "Kvant": "as stored" if in_blocks else "float32"}
    rows = []
    for batch in batches:
        numbers = random.Random(0)
        prompts = [
            [numbers.randrange(llm.engine.vocab_size) for _ in range(context)] for _ in range(batch)
        ]
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in engines}
        for number in range(rounds):  # the order is reversed in every round
            for name in engines if number % 2 else reversed(engines):
                found[name].append(tuple(engines[name](prompts, steps)))
        case = f"decode, batch {batch}, {context} tokens"
        rows += [
            Speed(case, name, weights[name], str(KVDtype.FLOAT32), batch, tuple(found[name]))
            for name in engines
        ]
    return rows


def _own_decode(
    llm: LLM, batch: int, context: int, steps: int
) -> Callable[[list[list[int]], int], list[float]]:
    """Returns a function that times decode steps of a new engine over the weights of `llm`."""
    plan = plan_storing(llm, FormatRequest(KVDtype.FLOAT32, KVDtype.FLOAT32))
    # A sequence that starts first decodes while the prompts of the others are computed.
    most = context + WARM_UP_STEPS + steps + 2 * batch
    engine = engine_storing(llm, plan, num_seqs=batch, max_model_len=most)

    def decode(prompts: list[list[int]], repeats: int) -> list[float]:
        params = SamplingParams(temperature=0.0, max_tokens=most - context, ignore_eos=True)
        started = [engine.submit(prompt, params) for prompt in prompts]
        waiting = set(started)
        while waiting:
            waiting -= {piece.number for piece in engine.step()}
        times = []
        for _ in range(WARM_UP_STEPS + repeats):
            begin = time.perf_counter()
            pieces = engine.step()
            times.append(1000 * (time.perf_counter() - begin))
            assert len(pieces) == len(prompts), "each sequence gets one token"
        for number in started:
            engine.cancel(number)
        return times[WARM_UP_STEPS:]

    return decode


class _Clock(StoppingCriteria):
    """Records the time after each step and never stops generation."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def decode_transformers(
    model: Any, prompts: Tensor, steps: int, cache: DynamicCache | None = None
) -> list[float]:
    """Returns milliseconds of each of `steps` greedy steps of `generate`, with its default attention.

    prompts: [sequences, tokens], int64. cache: a cache with the keys and values of the prompts without their
    last token; None for a new one.
    """
    new = WARM_UP_STEPS + steps + 1
    clock = _Clock()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        past_key_values=DynamicCache(config=model.config) if cache is None else cache,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    times = clock.times
    found = [1000 * (after - before) for before, after in pairwise(times)]
    return found[WARM_UP_STEPS:]
