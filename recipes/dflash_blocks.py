"""Packed rows of token sequences, features from the target, and the blocks drafted over them.

Training and evaluation ask the same question, so they share this code: given rows of tokens, the
target's features for them and some anchors, what does the drafter say comes after each anchor?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dflash_data import Answer
from dflash_model import Drafter, block_visibility, dense_mask
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows of L tokens, each holding several whole sequences (all tensors [R, L])."""

    tokens: Tensor
    segments: Tensor  # which sequence of the row; -1 is padding
    positions: Tensor  # place within the sequence
    anchorable: Tensor  # bool: answer tokens followed by a token worth predicting

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, index: Tensor) -> Rows:
        return Rows(
            self.tokens[index],
            self.segments[index],
            self.positions[index],
            self.anchorable[index],
        )

    def to(self, device: torch.device) -> Rows:
        return Rows(
            self.tokens.to(device),
            self.segments.to(device),
            self.positions.to(device),
            self.anchorable.to(device),
        )


def pack_rows(answers: list[Answer], length: int) -> Rows:
    """Lay sequences side by side in rows of ``length``, first fit, longest first."""
    too_long = max(len(answer.tokens) for answer in answers)
    if too_long > length:
        raise ValueError(
            f"a sequence of {too_long} tokens does not fit a row of {length}: "
            "raise --row-length or lower --max-new-tokens"
        )
    shortest = min(len(answer.tokens) for answer in answers)
    order = sorted(range(len(answers)), key=lambda i: -len(answers[i].tokens))
    rows: list[list[int]] = []
    room: list[int] = []
    open_rows: list[int] = []
    for i in order:
        size = len(answers[i].tokens)
        place = next((r for r in open_rows if room[r] >= size), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(length)
            open_rows.append(place)
        rows[place].append(i)
        room[place] -= size
        # Only the newest rows stay open, which keeps packing linear.
        open_rows = [r for r in open_rows[-64:] if room[r] >= shortest]
    shape = (len(rows), length)
    tokens = np.zeros(shape, np.int64)
    segments = np.full(shape, -1, np.int64)
    positions = np.zeros(shape, np.int64)
    anchorable = np.zeros(shape, bool)
    for r, members in enumerate(rows):
        at = 0
        for segment, i in enumerate(members):
            answer = answers[i]
            size = len(answer.tokens)
            tokens[r, at : at + size] = answer.tokens
            segments[r, at : at + size] = segment
            positions[r, at : at + size] = np.arange(size)
            first = max(answer.prompt_length, answer.first_label - 1)
            anchorable[r, at + first : at + size - 1] = True
            at += size
    return Rows(*(torch.from_numpy(a) for a in (tokens, segments, positions, anchorable)))


def embedding_and_head(target: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The target's embedding and lm_head weights, both [vocabulary, hidden_size]."""
    model: Any = target
    embedding: Tensor = model.get_input_embeddings().weight.detach()
    head: Tensor = model.get_output_embeddings().weight.detach()
    return embedding, head


@torch.inference_mode()
def target_features(target: PreTrainedModel, rows: Rows, layer_ids: tuple[int, ...]) -> Tensor:
    """Hidden states of the tapped layers, side by side: [R, L, taps * hidden_size]."""
    causal = torch.ones(rows.tokens.shape[1], rows.tokens.shape[1], device=rows.tokens.device)
    same = rows.segments[:, :, None] == rows.segments[:, None, :]
    out = target.base_model(
        input_ids=rows.tokens,
        position_ids=rows.positions,
        attention_mask=(same & causal.tril().bool())[:, None],
        use_cache=False,
        output_hidden_states=True,
    )
    # hidden_states[0] is the embedding, so layer i's output stands at i + 1.
    return torch.cat([out.hidden_states[i + 1] for i in layer_ids], dim=-1)


def sample_anchors(
    rows: Rows, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Choose ``count`` anchors a row: indices [R, count] in order, and which of them are real.

    Drawn without replacement; without a generator, the first ``count`` anchorable places. Rows with
    fewer get unreal ones.
    """
    device = rows.tokens.device
    if generator is None:
        score = torch.arange(rows.tokens.shape[1], 0, -1, device=device).expand(rows.tokens.shape)
        score = score / (rows.tokens.shape[1] + 1)
    else:
        score = torch.rand(rows.tokens.shape, device=device, generator=generator)
    score = torch.where(rows.anchorable, score + 1e-6, 0.0)
    best, index = score.topk(min(count, score.shape[1]), dim=1)
    index, order = index.sort(dim=1)
    return index, best.gather(1, order) > 0


def block_labels(
    rows: Rows, anchors: Tensor, real: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """The tokens after each anchor [R, A, block_size - 1] and which of them exist."""
    offset = torch.arange(1, block_size, device=anchors.device)
    index = anchors[..., None] + offset
    inside = index < rows.tokens.shape[1]
    index = index.clamp(max=rows.tokens.shape[1] - 1).flatten(1)
    shape = (*anchors.shape, block_size - 1)
    labels = rows.tokens.gather(1, index).view(shape)
    same = rows.segments.gather(1, index).view(shape) == rows.segments.gather(1, anchors)[..., None]
    return labels, inside & same & real[..., None]


def block_mask(rows: Rows, anchors: Tensor, block_size: int, sparse: bool) -> Tensor | BlockMask:
    """Visibility of every block; ``sparse`` needs CUDA and a compiled drafter."""
    visible = block_visibility(rows.segments, anchors, block_size)
    batch, length = rows.tokens.shape
    queries = anchors.shape[1] * block_size
    if sparse:
        return create_block_mask(
            visible, batch, None, queries, length + queries, device=str(rows.tokens.device)
        )
    return dense_mask(visible, batch, queries, length + queries, rows.tokens.device)


def draft_states(
    drafter: Drafter,
    embedding: Tensor,
    rows: Rows,
    features: Tensor,
    anchors: Tensor,
    mask: Tensor | BlockMask,
) -> Tensor:
    """Draft a block at every anchor: states for the lm_head, [R, A, block_size - 1, hidden]."""
    size = drafter.config.block_size
    block = torch.full((*anchors.shape, size), drafter.config.mask_token_id, device=anchors.device)
    block[..., 0] = rows.tokens.gather(1, anchors)
    offset = torch.arange(size, device=anchors.device)
    positions = rows.positions.gather(1, anchors)[..., None] + offset
    out = drafter(
        embedding[block.flatten(1)],
        drafter.context(features),
        positions.flatten(1),
        rows.positions,
        mask,
    )
    hidden: Tensor = out.view(*anchors.shape, size, -1)[:, :, 1:]
    return hidden
