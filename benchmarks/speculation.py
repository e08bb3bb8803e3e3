"""Gain of speculation: the same prompts with and without drafts, in turns in one run.

Both engines stay loaded. Each prompt is answered by one and then by the other, in an order that changes from
prompt to prompt, so that a machine that slows down slows both. Times are those of decoding: from the
first token of an answer to its last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.json_lines import read_texts
from kvant.engine.llm import LLM, Prompt
from kvant.errors import BadValue
from kvant.kv.names import parse_format
from kvant.kv.request import Asked
from kvant.plan.config import EngineConfig
from kvant.plan.speculative_config import SpeculativeConfig
from kvant.sampling.sampling_params import SamplingParams
from kvant.speculative.counts import SpeculationStats


@dataclass(frozen=True, slots=True)
class Timed:
    """Tokens after the first, and their seconds, over all prompts."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __add__(self, other: Timed) -> Timed:
        return Timed(self.tokens + other.tokens, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class Compared:
    """One pair of formats. target, draft: what their layers store; draft "-" if there is none.

    same_answers: of num_prompts, how many answers had the same tokens with and without drafts.
    """

    target: str
    draft: str
    plain: Timed
    drafting: Timed
    stats: SpeculationStats
    same_answers: int
    num_prompts: int

    @property
    def speedup(self) -> float:
        return self.drafting.tokens_per_second / self.plain.tokens_per_second

    @property
    def accepted(self) -> tuple[float, ...]:
        """Returns, by position, the share of drafted steps in which that draft was accepted."""
        steps = max(1, self.stats.num_drafts)
        return tuple(count / steps for count in self.stats.accepted_per_position)

    def as_json(self) -> dict[str, object]:
        stats = self.stats
        return {
            "target_kv": self.target,
            "draft_kv": self.draft,
            "plain_tokens_per_second": round(self.plain.tokens_per_second, 3),
            "tokens_per_second": round(self.drafting.tokens_per_second, 3),
            "speedup": round(self.speedup, 4),
            "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
            "accepted_per_position": [round(share, 4) for share in self.accepted],
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_plain_steps": stats.num_plain_steps,
            "tokens": self.drafting.tokens,
            "same_answers": self.same_answers,
            "prompts": self.num_prompts,
        }


@dataclass(frozen=True, slots=True)
class FormatPair:
    """Formats requested for target and draft; None for the default."""

    target: Asked | None = None
    draft: Asked | None = None


def parse_pair(text: str, *, asked_by: str) -> FormatPair:
    """Parses `TARGET:DRAFT`, each a KV format as in --kv-cache-dtype."""
    target, colon, draft = text.partition(":")
    if not colon:
        raise BadValue(
            f"{asked_by}: {text!r} is no pair", why="write TARGET:DRAFT, such as fp8:bf16"
        )
    return FormatPair(*(_asked(part, f"{asked_by} {text}") for part in (target, draft)))


def _asked(name: str, by: str) -> Asked:
    return Asked(parse_format(name, asked_by=by), by)


def read_prompts(path: Path, count: int) -> list[str]:
    """Returns the first `count` prompts of a file of JSON lines with a `question` or a `prompt`."""
    return [prompt for (prompt,) in read_texts(path, ("question", "prompt"), count=count)]


def compare(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    pairs: Sequence[FormatPair],
    prompts: Sequence[Prompt],
    max_tokens: int,
) -> Iterator[Compared]:
    """Runs each pair of formats in turn: both engines, every prompt by both.

    A prompt is a user's message, or token ids.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for pair in pairs:
        plain_config = _with_formats(config, pair)
        wanted = replace(speculative, kv_cache_dtype=pair.draft or speculative.kv_cache_dtype)
        plan = replace(plain_config.plan, speculative=wanted)
        plain = LLM.from_config(plain_config)
        drafting = LLM.from_config(replace(plain_config, plan=plan))
        tokens = [_tokens(plain, prompt) for prompt in prompts]
        yield _compare(plain, drafting, tokens, params)


def _tokens(llm: LLM, prompt: Prompt) -> Sequence[int]:
    if isinstance(prompt, str):
        return llm.encode_chat([{"role": "user", "content": prompt}])
    return prompt


def _with_formats(config: EngineConfig, pair: FormatPair) -> EngineConfig:
    plan = replace(config.plan, speculative=None)
    if pair.target is not None:
        requests = plan.requests
        target = replace(requests.target, explicit=(pair.target, *requests.target.explicit))
        plan = replace(plan, requests=replace(requests, target=target))
    return replace(config, plan=plan)


def _compare(
    plain: LLM, drafting: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Compared:
    warm = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for llm in (plain, drafting):
        _answer(llm, prompts[0], warm)
    before = drafting.engine.stats.speculation
    times = {id(plain): Timed(), id(drafting): Timed()}
    same = 0
    for number, prompt in enumerate(prompts):
        order = (plain, drafting) if number % 2 == 0 else (drafting, plain)
        answers = []
        for llm in order:
            tokens, timed = _answer(llm, prompt, params)
            times[id(llm)] += timed
            answers.append(tokens)
        same += answers[0] == answers[1]
    after = drafting.engine.stats.speculation
    assert before is not None
    assert after is not None
    draft = drafting.planned.draft
    return Compared(
        target=", ".join(plain.plan.formats),
        draft="-" if draft is None else ", ".join(draft.kv.formats),
        plain=times[id(plain)],
        drafting=times[id(drafting)],
        stats=after.since(before),
        same_answers=same,
        num_prompts=len(prompts),
    )


def _answer(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], Timed]:
    tokens: list[int] = []
    first = last = 0.0
    for piece in llm.stream(prompt, params):
        last = time.perf_counter()
        first = first or last
        tokens += piece.token_ids
    return tokens, Timed(len(tokens) - 1, last - first)


def table(rows: Sequence[Compared]) -> str:
    """Formats results as Markdown."""
    positions = max((len(row.accepted) for row in rows), default=0)
    heads = [f"{place}." for place in range(1, positions + 1)]
    lines = [
        "| target KV | draft KV | plain tok/s | with drafts | speedup | tokens a step | "
        + " | ".join(heads)
        + " | same answers |",
        "| --- | --- |" + " ---: |" * (5 + positions),
    ]
    for row in rows:
        shares = [f"{share:.3f}" for share in row.accepted]
        lines.append(
            f"| {row.target} | {row.draft} | {row.plain.tokens_per_second:.1f} | "
            f"{row.drafting.tokens_per_second:.1f} | {row.speedup:.2f}x | "
            f"{row.stats.mean_acceptance_length:.2f} | {' | '.join(shares)} | "
            f"{row.same_answers} of {row.num_prompts} |"
        )
    return "\n".join(lines)
