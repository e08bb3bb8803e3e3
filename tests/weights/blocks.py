"""The definition of `wide_rows.Blocks`: where each number lies, and what is stored there."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.weights.cuda.few_rows import token_tiles
from kvant.weights.cuda.wide_rows import Blocks

RAISED = 2.0**64


def in_blocks(x: Tensor) -> Blocks:
    """Returns rows x [tokens, columns] in bfloat16 as blocks; tokens behind the last are NaN."""
    made = Blocks.empty(*x.shape, x.device)
    made.data.fill_(torch.nan)
    made.data.view(-1)[_places(*x.shape).to(x.device)] = x * RAISED
    return made


def in_rows(blocks: Blocks) -> Tensor:
    """Returns blocks as rows [tokens, columns]."""
    places = _places(len(blocks), blocks.columns).to(blocks.data.device)
    return blocks.data.view(-1)[places] / RAISED


def _places(tokens: int, columns: int) -> Tensor:
    """Returns where number [token, column] lies, as [tokens, columns] indices.

    A block has two halves of 64 columns; a half has a row of 128 bytes for each token. The four pairs of 8
    columns go to four pieces of 16 bytes, whose places are swizzled by the token.
    """
    token, column = torch.arange(tokens)[:, None], torch.arange(columns)
    block, half, eighth, place = column // 128, column // 64 % 2, column // 8 % 8, column % 8
    tiles = token_tiles(tokens)
    row = ((2 * block + half) * tiles + token // 8) * 512 + token % 8 * 64
    piece = (4 * (eighth % 2) + place // 4 * 2 + place % 2) ^ (token % 8)
    return row + 8 * piece + eighth // 2 * 2 + place // 2 % 2
