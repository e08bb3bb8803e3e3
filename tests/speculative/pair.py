"""A tiny target and a drafter that learnt some of its answers: some drafts stand, some do not."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tests.models import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))  # the drafter in plain torch

from dflash_model import Drafter, DrafterConfig

BLOCK = 5
MASK = 127
TAPS = (0, 2)
ANSWER = 28
_STEPS = 240


@dataclass(frozen=True, slots=True)
class Pair:
    """Directories of target and drafter, the same in plain torch, and prompts that were learnt."""

    target: Path
    draft: Path
    model: PreTrainedModel
    drafter: Drafter
    prompts: tuple[tuple[int, ...], ...]


def config(**changes: object) -> DrafterConfig:
    fields = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=10000.0,
        max_position_embeddings=512, vocab_size=tiny.VOCAB, block_size=BLOCK, mask_token_id=MASK,
        target_layer_ids=TAPS, num_target_layers=4,
    )  # fmt: skip
    return DrafterConfig(**{**fields, **changes})


def build_pair(directory: Path) -> Pair:
    target = tiny.build("llama", directory)
    model = tiny.make("llama")
    rng = random.Random(3)
    prompts = tuple(
        tuple(rng.randrange(3, 120) for _ in range(rng.randint(4, 40))) for _ in range(10)
    )
    torch.manual_seed(5)
    drafter = Drafter(config())
    _learn(model, drafter, [_answer(model, prompt) for prompt in prompts])
    draft = directory / "draft"
    drafter.save(draft)
    return Pair(target, draft, model.double(), Drafter.load(draft, torch.float64), prompts)


@torch.no_grad()
def _answer(model: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[Tensor, int]:
    """Prompt and greedy answer as [1, N], and the prompt's length."""
    tokens = torch.tensor([prompt])
    for _ in range(ANSWER):
        following = model(input_ids=tokens).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens, len(prompt)


def _learn(model: PreTrainedModel, drafter: Drafter, answers: list[tuple[Tensor, int]]) -> None:
    """A block at every place of an answer, side by side; one answer a step."""
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    examples = [_example(model, tokens, start) for tokens, start in answers]
    for step in range(_STEPS):
        features, block, positions, mask, labels = examples[step % len(examples)]
        out = drafter(
            embedding[block], drafter.context(features), positions,
            torch.arange(features.shape[1])[None], mask,
        )  # fmt: skip
        states = out.view(-1, BLOCK, out.shape[-1])[:, 1:]
        loss = F.cross_entropy((states @ head.T).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def _example(model: PreTrainedModel, tokens: Tensor, start: int) -> tuple[Tensor, ...]:
    hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states
    features = torch.cat([hidden[i + 1] for i in TAPS], dim=-1)
    length = tokens.shape[1]
    anchors = torch.arange(start, length - BLOCK)
    places = anchors[:, None] + torch.arange(BLOCK)
    block = torch.full_like(places, MASK)
    block[:, 0] = tokens[0, anchors]
    owner = torch.arange(len(anchors)).repeat_interleave(BLOCK)
    seen = torch.arange(length)[None] < anchors[owner][:, None]
    own = owner[:, None] == owner[None]
    mask = torch.cat([seen, own], dim=1)[None, None]
    return features, block.view(1, -1), places.view(1, -1), mask, tokens[0, places[:, 1:]]
