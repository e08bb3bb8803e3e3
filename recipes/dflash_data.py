"""Prompts, and the target's own answers to them: what a drafter learns from.

A drafter is accepted when it says what the target would have said, so the target writes its own
training data. Greedy answers alone repeat themselves: every question has one. Most answers here
therefore begin with a few *sampled* tokens and go on greedily; only the greedy part is learnt from.
Some answers are sampled throughout.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and its answer as token ids; tokens before ``first_label`` are given, not learnt."""

    tokens: np.ndarray  # [N] int32, the stop token included where the target emitted one
    prompt_length: int
    first_label: int


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to ask for: the first ``sampled_tokens`` of it are sampled, the rest is greedy."""

    prompt: tuple[int, ...]
    sampled_tokens: int
    learn_sampled: bool = False


def read_prompts(path: Path) -> list[str]:
    """The ``question`` or ``prompt`` of every line of a JSON-lines file."""
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        record = json.loads(line)
        text = record.get("question", record.get("prompt"))
        if text is None:
            raise ValueError(f"{path}:{number} has neither 'question' nor 'prompt'")
        prompts.append(text)
    return prompts


def expand_templates(path: Path, chat: int, word_problems: int, seed: int) -> list[str]:
    """Write prompts from a file of topics and templates; the same arguments give the same prompts.

    ``chat`` templates with topics, ``word_problems`` sums in words, and every coding task twice.
    """
    source = json.loads(path.read_text())
    rng = random.Random(seed)
    templates = [text for group in source["chat"].values() for text in group]
    pairs = [(text, topic) for text in templates for topic in source["topics"]]
    prompts = []
    for text, topic in rng.sample(pairs, min(chat, len(pairs))):
        other = rng.choice([t for t in source["topics"] if t != topic])
        filled = text.format(topic=topic, other=other)
        prompts.append(filled[0].upper() + filled[1:])
    for task in source["tasks"]:
        prompts += [text.format(task=task) for text in rng.sample(source["code"], 2)]
    for _ in range(word_problems):
        text = rng.choice(source["word_problems"] * 4 + source["arithmetic"])
        a, b, c = rng.sample(source["names"], 3)
        m, n, k = rng.randint(3, 60), rng.randint(2, 20), rng.randint(2, 9)
        filled = text.format(
            a=a, b=b, c=c, m=m, n=n, k=k, big=rng.randint(61, 600), prod=m * n,
            thing=rng.choice(source["things"]),
        )  # fmt: skip
        prompts.append(filled)
    return list(dict.fromkeys(prompts))


def vary_numbers(prompt: str, rng: random.Random) -> str:
    """The prompt with every whole number above 1 replaced by one between half and twice of it."""

    def other(match: re.Match[str]) -> str:
        number = int(match.group())
        return match.group() if number < 2 else str(rng.randint(max(2, number // 2), 2 * number))

    # Numbers of up to four digits that are no part of a decimal, an ordinal or a longer number.
    return re.sub(r"(?<![\d.,])\d{1,4}(?![\d.,]*\d|st|nd|rd|th)", other, prompt)


def chat_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[int, ...]:
    """The prompt as one user turn of the chat template, its default system turn included."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    return tuple(ids)


def plan_requests(
    prompts: Sequence[tuple[int, ...]],
    continued: int,
    sampled: float,
    longest_start: int,
    max_new_tokens: int,
    rng: random.Random,
) -> list[Request]:
    """For each prompt a greedy answer, ``continued`` greedy ones after a sampled start of 1 to
    ``longest_start`` tokens, and with probability ``sampled`` one sampled throughout."""
    requests = []
    for prompt in prompts:
        requests.append(Request(prompt, 0))
        for _ in range(continued):
            requests.append(Request(prompt, rng.randint(1, longest_start)))
        if rng.random() < sampled:
            requests.append(Request(prompt, max_new_tokens, learn_sampled=True))
    return requests


@torch.inference_mode()
def generate_answers(
    target: PreTrainedModel,
    requests: Sequence[Request],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    temperature: float,
    batch: int,
    seed: int,
) -> list[Answer]:
    """Let the target answer, ``batch`` requests at a time, in the order asked.

    An answer ends with its stop token or after ``max_new_tokens``. The same seed, batch and device
    give the same answers.
    """
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    answers: list[Answer | None] = [None] * len(requests)
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    for start in range(0, len(order), batch):
        members = order[start : start + batch]
        part = [requests[i] for i in members]
        replies = _generate_batch(target, part, max_new_tokens, stop_ids, temperature, generator)
        for i, request, reply in zip(members, part, replies, strict=True):
            tokens = np.array((*request.prompt, *reply), np.int32)
            given = 0 if request.learn_sampled else min(request.sampled_tokens, len(reply))
            size = len(request.prompt)
            answers[i] = Answer(tokens, size, size + given)
    return [answer for answer in answers if answer is not None]


def _generate_batch(
    target: PreTrainedModel,
    requests: list[Request],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    temperature: float,
    generator: torch.Generator,
) -> list[list[int]]:
    device = target.device
    width = max(len(request.prompt) for request in requests)
    tokens = torch.zeros(len(requests), width, dtype=torch.long, device=device)
    mask = torch.zeros(len(requests), width, dtype=torch.long, device=device)
    for row, request in enumerate(requests):
        tokens[row, width - len(request.prompt) :] = torch.tensor(request.prompt, device=device)
        mask[row, width - len(request.prompt) :] = 1
    sampled = torch.tensor([request.sampled_tokens for request in requests], device=device)
    stops = torch.tensor(sorted(stop_ids), device=device)
    replies = torch.full((len(requests), max_new_tokens), -1, dtype=torch.long, device=device)
    alive = torch.arange(len(requests), device=device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    running = torch.ones(len(requests), dtype=torch.bool, device=device)
    any_sampled = bool((sampled > 0).any())
    for step in range(max_new_tokens):
        logits = target(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        chosen = logits.argmax(-1)
        if any_sampled:
            free = sampled[alive] > step
            chosen = torch.where(free, _sample(logits, temperature, generator), chosen)
        replies[alive, step] = torch.where(running, chosen, -1)
        running = running & ~torch.isin(chosen, stops)
        if step % 16 == 15:
            # Finished sequences leave the batch, so that the rest runs faster.
            keep = running.nonzero()[:, 0]
            if len(keep) == 0:
                break
            if len(keep) < 0.9 * len(running):
                cache.batch_select_indices(keep)
                alive, running, mask = alive[keep], running[keep], mask[keep]
                chosen, position = chosen[keep], position[keep]
        tokens = chosen[:, None]
        position = position[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return [[t for t in row if t >= 0] for row in replies.tolist()]


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One draw a row from softmax(logits / temperature), by the Gumbel trick: [B, V] -> [B]."""
    noise = torch.empty(logits.shape, device=logits.device).exponential_(generator=generator)
    return (logits.float() / temperature - noise.log()).argmax(-1)


def save_answers(path: Path, answers: list[Answer]) -> None:
    """Write answers as one compressed npz of flat arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = np.concatenate([answer.tokens for answer in answers])
    np.savez_compressed(
        path,
        tokens=flat.astype(np.uint16 if flat.max() < 2**16 else np.int32),
        lengths=np.array([len(answer.tokens) for answer in answers], np.int32),
        prompt_lengths=np.array([answer.prompt_length for answer in answers], np.int32),
        first_labels=np.array([answer.first_label for answer in answers], np.int32),
    )


def load_answers(path: Path) -> list[Answer]:
    """Read back what ``save_answers`` wrote."""
    with np.load(path) as held:
        flat = held["tokens"].astype(np.int32)
        lengths, prompts, labels = held["lengths"], held["prompt_lengths"], held["first_labels"]
    pieces = np.split(flat, np.cumsum(lengths)[:-1])
    return [
        Answer(piece, int(p), int(f)) for piece, p, f in zip(pieces, prompts, labels, strict=True)
    ]
