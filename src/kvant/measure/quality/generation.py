"""Effects of formats on generated text: greedy answers compared with the widest format's, and needles."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvant.engine.llm import LLM
from kvant.kv.spec import KVPlan
from kvant.measure.own_engine import engine_storing
from kvant.sampling.sampling_params import SamplingParams

PROMPT_TOKENS = 128
DEPTHS = (0.1, 0.5, 0.9)
_QUESTION = "\n\nWhat is the secret number? The secret number is"
_ANSWER_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy answers of a format compared with the baseline's, for the same prompts.

    same: share of tokens that are equal at the same place. common: tokens before the first difference,
    mean over answers. answers: their number. tokens: of each.
    """

    answers: int
    tokens: int
    same: float
    common: float


def answers_of(
    llm: LLM, plan: KVPlan, prompts: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """Answers all prompts at once, greedily, by `tokens` tokens each, with K and V stored as in `plan`."""
    longest = max(len(prompt) for prompt in prompts) + tokens
    engine = engine_storing(llm, plan, num_seqs=len(prompts), max_model_len=longest)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    numbers = [engine.submit(prompt, params) for prompt in prompts]
    found: dict[int, list[int]] = {}
    while engine.has_work:
        for piece in engine.step():
            if piece.result is not None:
                found[piece.number] = list(piece.result.token_ids)
    return [found[number] for number in numbers]


def agreement(baseline: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Agreement:
    """Compares answers token by token; all have the same length."""
    same = common = 0
    for expected, given in zip(baseline, answers, strict=True):
        equal = [a == b for a, b in zip(expected, given, strict=True)]
        same += sum(equal)
        common += equal.index(False) if False in equal else len(equal)
    tokens = len(baseline[0])
    return Agreement(len(answers), tokens, same / (tokens * len(answers)), common / len(answers))


def prompts_of(token_ids: Sequence[int], count: int) -> list[list[int]]:
    """Returns pieces of PROMPT_TOKENS tokens, spread over the whole text."""
    stride = max(1, (len(token_ids) - PROMPT_TOKENS) // max(1, count))
    return [list(token_ids[i * stride : i * stride + PROMPT_TOKENS]) for i in range(count)]


def acceptance_length(
    llm: LLM, stored: str, drafter: str, prompts: Sequence[Sequence[int]], tokens: int
) -> float:
    """Returns tokens per step, including the target's own, in greedy answers with `drafter`.

    stored: name of the target's KV format. drafter: as in `--speculative-config`. Loads the model a second
    time. Raises ConfigError if the format and the drafter cannot be combined.
    """
    longest = max(len(prompt) for prompt in prompts) + tokens
    request = llm.planned.request
    drafting = LLM(
        request.model,
        hf_overrides=None if request.overrides is None else request.overrides.values,
        dtype=str(llm.plan.compute_dtype.value),
        device=str(request.device.kind.value),
        kv_cache_dtype=stored,
        kv_cache_memory=len(prompts) * (longest + 64) * (llm.plan.bytes_per_token_16bit * 4),
        max_model_len=longest,
        max_num_seqs=len(prompts),
        speculative_config=json.loads(drafter),
    )
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    drafting.generate([list(prompt) for prompt in prompts], params)
    found = float(drafting.metrics()["spec_decode_mean_acceptance_length"])
    return max(1.0, found)  # 0 if nothing was drafted: each step gave the target's own token


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt with a number hidden in text, and the number."""

    prompt: list[int]
    number: str


def needles(llm: LLM, token_ids: Sequence[int], length: int) -> list[Needle]:
    """Returns one needle at each of DEPTHS, in prompts of `length` tokens."""
    found = []
    for index, depth in enumerate(DEPTHS):
        number = str(random.Random(f"{length} {index}").randrange(10_000, 100_000))
        hidden = list(_plain(llm, f"\n\nThe secret number is {number}.\n\n"))
        question = list(_plain(llm, _QUESTION))
        room = length - len(hidden) - len(question)
        start = index * room % max(1, len(token_ids) - room)
        text = list(token_ids[start : start + room])
        place = int(depth * len(text))
        found.append(Needle([*text[:place], *hidden, *text[place:], *question], number))
    return found


def found_needles(llm: LLM, plan: KVPlan, wanted: Sequence[Needle]) -> int:
    """Returns how many numbers occur in the answers."""
    tokenizing = llm.tokenizing
    assert tokenizing is not None
    answers = answers_of(llm, plan, [needle.prompt for needle in wanted], _ANSWER_TOKENS)
    texts = [tokenizing.backend.decode(answer) for answer in answers]
    return sum(needle.number in text for needle, text in zip(wanted, texts, strict=True))


def _plain(llm: LLM, text: str) -> Sequence[int]:
    tokenizing = llm.tokenizing
    assert tokenizing is not None
    return tokenizing.encode(text, add_special_tokens=False)
