"""Functions of single elements that do not depend on where an element stands.

On a CPU torch computes most of a tensor with vector instructions and what is left at the end of each
thread's share one by one, with another exp: SiLU of the same number differs in its last bit. Here
only whole vectors are given to torch, and never enough for a second thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_WHOLE = 64
"""Elements; a multiple of what torch takes at once in any dtype, on any CPU."""

_PIECE = 16384
"""Elements for one thread; torch takes a second one from 32768 on."""


def by_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise `function` to x [..], such that a result does not depend on its position.

    function must be finite at 0.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    count = flat.numel()
    if count % _WHOLE:
        flat = F.pad(flat, (0, -count % _WHOLE))
    parts = [function(part) for part in torch.split(flat, _PIECE)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[:count].view(x.shape)
