"""Numbers that betray in which order a matrix product adds.

Every product of a row has its negative somewhere in it: exact sums would be 0, so what comes out are
roundings alone. With other numbers a result in 16 bits hides nearly every difference between sums in
float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weight_like(weight: Tensor) -> Tensor:
    """Of the same shape [out, in], strides and dtype, for `rows_for`."""
    half, order = weight.shape[1] // 2, _order(weight.shape[1])
    generator = torch.Generator(weight.device).manual_seed(2)
    numbers = torch.empty_like(weight[:, :half]).normal_(generator=generator)
    rest = torch.zeros_like(weight[:, 2 * half :])
    made = torch.empty_like(weight)
    made[:] = torch.cat((numbers, -numbers, rest), dim=1)[:, order.to(weight.device)]
    return made


def rows_for(count: int, weight: Tensor, *, seed: int) -> Tensor:
    """[count, in], of the weight's dtype."""
    generator = torch.Generator(weight.device).manual_seed(seed)
    columns = weight.shape[1]
    half = torch.randn(count, columns // 2, generator=generator, device=weight.device)
    half = half.to(weight.dtype)
    rest = torch.zeros(count, columns % 2, dtype=weight.dtype, device=weight.device)
    return torch.cat((half, half, rest), dim=1)[:, _order(columns).to(weight.device)]


def _order(columns: int) -> Tensor:
    """Where the columns that cancel each other stand: anywhere."""
    return torch.randperm(columns, generator=torch.Generator().manual_seed(3))
