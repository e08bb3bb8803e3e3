"""Elementwise functions whose result does not depend on an element's position.

On a CPU torch computes most of a tensor with vector instructions, and the elements at the end of each
thread's share one by one, with another exp: SiLU of the same number differs in its last bit. Here torch
gets whole vectors only, and never enough of them for a second thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_WHOLE = 64
"""Elements; a multiple of torch's vector width in any dtype, on any CPU."""

_PIECE = 16384
"""Elements per call, for one thread; torch starts a second thread from 32768 on."""


def by_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies an elementwise function to x [..], so that a result does not depend on its position.

    The function must be finite at 0. Returns a new tensor [..].
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
