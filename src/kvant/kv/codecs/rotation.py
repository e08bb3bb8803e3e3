"""The block Walsh-Hadamard rotation: spreads a row's outliers over all its elements.

A row of head_dim numbers is cut into blocks of B, the largest power of two that divides head_dim
(96 is three blocks of 32), and each block is multiplied with the B x B matrix H of +1 and -1,
unnormalised: H H = B. Since H is symmetric, q . k = rotate(q) . rotate(k) / B, so attention may
stay in rotated space.

Float32 sums depend on their order, and bytes on the sums, so the order is part of the definition:
butterflies (a, b) -> (a + b, a - b) on elements j and j + h, for h = 1, 2, 4, .. B / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_length(head_dim: int) -> int:
    """Returns the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def rotate(x: Tensor) -> Tensor:
    """x [.., head_dim] times H in every block, in x's own dtype (float32 or float64)."""
    block = block_length(x.shape[-1])
    pairs = x.reshape(-1, block)
    # One stage takes neighbours, writes all sums before all differences, and so moves index bit 0
    # to the top. After log2(block) stages each bit had its turn, in the order of the definition,
    # and all are back in place; every stage reads and writes long runs.
    for _ in range(block.bit_length() - 1):
        a, b = pairs[:, 0::2], pairs[:, 1::2]
        pairs = torch.cat((a + b, a - b), dim=-1)
    return pairs.view(x.shape)


def unrotate(y: Tensor) -> Tensor:
    """Returns the inverse of `rotate` for y [.., head_dim]; the division by a power of two is exact."""
    return rotate(y).mul_(1.0 / block_length(y.shape[-1]))
