"""How well a drafter does: mean acceptance length, tokens emitted per target step.

Two measurements of the same number. ``replay`` takes the target's greedy answers as given, drafts
at every place of them in one pass and walks along: fast. ``speculate`` is the real thing, one
request with caches: draft, verify, accept, crop; what it emits must equal plain greedy decoding.
A step's own token of the target counts; tokens after the stop token or the limit do not; the first
token, which comes from the prompt's prefill, belongs to no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dflash_blocks import (
    block_labels,
    block_mask,
    draft_states,
    embedding_and_head,
    pack_rows,
    sample_anchors,
    target_features,
)
from dflash_data import Answer
from dflash_loss import accepted
from dflash_model import Drafter
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over requests. ``per_position[k]``: steps whose drafts 0..k were all accepted."""

    steps: int
    tokens: int
    per_position: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens per target step, the target's own one included."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Per draft position, the share of steps that accepted it."""
        return tuple(count / max(self.steps, 1) for count in self.per_position)

    def __add__(self, other: Acceptance) -> Acceptance:
        if not self.per_position or not other.per_position:
            return self if self.per_position else other
        pairs = zip(self.per_position, other.per_position, strict=True)
        return Acceptance(
            self.steps + other.steps, self.tokens + other.tokens, tuple(a + b for a, b in pairs)
        )


NOTHING = Acceptance(0, 0, ())


def count_steps(steps: Sequence[tuple[int, int]], drafts: int) -> Acceptance:
    """Counts of (drafts accepted, tokens emitted) pairs, one a step, with ``drafts`` positions."""
    per_position = tuple(sum(run > k for run, _ in steps) for k in range(drafts))
    return Acceptance(len(steps), sum(emitted for _, emitted in steps), per_position)


@torch.inference_mode()
def replay(target: PreTrainedModel, drafter: Drafter, answer: Answer) -> Acceptance:
    """Acceptance on one greedy answer of the target, without running the target step by step."""
    size = drafter.config.block_size
    rows = pack_rows([answer], len(answer.tokens)).to(target.device)
    count = int(rows.anchorable.sum())
    if count == 0:
        return Acceptance(0, 0, (0,) * (size - 1))
    features = target_features(target, rows, drafter.config.target_layer_ids)
    anchors, real = sample_anchors(rows, count, None)
    labels, exists = block_labels(rows, anchors, real, size)
    mask = block_mask(rows, anchors, size, sparse=False)
    embedding, head = embedding_and_head(target)
    states = draft_states(drafter, embedding, rows, features, anchors, mask)
    guesses = (states @ head.t()).argmax(-1)
    runs = accepted((guesses == labels) & exists)[0].tolist()
    last = len(answer.tokens) - 1
    steps = []
    at = answer.prompt_length
    while at < last:
        run = runs[at - answer.prompt_length]
        emitted = min(run + 1, last - at)
        steps.append((run, emitted))
        at += emitted
    return count_steps(steps, size - 1)


@torch.inference_mode()
def greedy(
    target: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int]
) -> list[int]:
    """Plain greedy decoding of one prompt, a token a step."""
    device = target.device
    cache = DynamicCache()
    step = torch.tensor([list(prompt)], device=device)
    reply: list[int] = []
    while len(reply) < max_new_tokens:
        out = target(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        reply.append(int(out.logits[0, -1].argmax()))
        if reply[-1] in stop_ids:
            break
        step = torch.tensor([[reply[-1]]], device=device)
    return reply


@torch.inference_mode()
def speculate(
    target: PreTrainedModel,
    drafter: Drafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: frozenset[int],
) -> tuple[list[int], Acceptance]:
    """Greedy decoding with drafts: the reply and how the drafts fared.

    The target's cache always holds the tokens before the anchor; the anchor and its drafts are
    verified in one causal pass and what was refused is cropped. The features of a token come from
    the pass that verified it.
    """
    config = drafter.config
    device = target.device
    embedding, head = embedding_and_head(target)
    cache = DynamicCache()

    def run_target(tokens: list[int]) -> tuple[Tensor, Tensor]:
        out = target(
            input_ids=torch.tensor([tokens], device=device),
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        hidden = torch.cat([out.hidden_states[i + 1] for i in config.target_layer_ids], dim=-1)
        return out.logits[0].argmax(-1), drafter.context(hidden)

    choices, context = run_target(list(prompt))
    reply = [int(choices[-1])]
    steps = []
    masks = [config.mask_token_id] * (config.block_size - 1)
    while reply[-1] not in stop_ids and len(reply) < max_new_tokens:
        start = context.shape[1]
        known = torch.arange(start, device=device)[None]
        positions = torch.arange(start, start + config.block_size, device=device)[None]
        block = embedding[torch.tensor([[reply[-1], *masks]], device=device)]
        states = drafter(block, context, positions, known, None)
        drafts = (states[0, 1:] @ head.t()).argmax(-1).tolist()

        choices, fresh = run_target([reply[-1], *drafts])
        right = choices.tolist()
        run = next((k for k, d in enumerate(drafts) if d != right[k]), len(drafts))
        if run < len(drafts):
            cache.crop(run - len(drafts))
        context = torch.cat([context, fresh[:, : run + 1]], dim=1)
        emitted = right[: run + 1][: max_new_tokens - len(reply)]
        stop = next((k for k, t in enumerate(emitted) if t in stop_ids), len(emitted) - 1)
        emitted = emitted[: stop + 1]
        reply += emitted
        steps.append((min(run, len(emitted)), len(emitted)))
    return reply, count_steps(steps, config.block_size - 1)
