"""Fixes rotary frequencies, so that they do not depend on other sequences in a batch.

transformers recomputes the frequencies of `longrope` and `dynamic` models in every forward, from
its largest position. In a packed batch, one long sequence would change the tokens of others, and
keys stored before the change would have the wrong rotation. So the plan fixes a length
(`kvant.models.geometry.rope`), and the modules get its frequencies here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvant.errors import NotServable

# Prefixes of transformers' rope types whose frequencies change between forwards.
_MOVING = ("dynamic", "longrope")


def fix_frequencies(model: nn.Module, length: int | None) -> None:
    """Sets every rotary embedding with changing frequencies to those at `length` positions.

    length: None for the original length. Raises NotServable if several such types are in one module.
    """
    for name, module in model.named_modules():
        rope_type: Any = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict) and any(map(_moves, rope_type.values())):
            raise NotServable(
                f"{name} has rotary frequencies that move, and of several types",
                why="they would depend on the longest sequence in the batch",
            )
        if isinstance(rope_type, str) and _moves(rope_type):
            _fix(module, rope_type, length)


def _moves(rope_type: str) -> bool:
    return any(word in rope_type for word in _MOVING)


def _fix(module: Any, rope_type: str, length: int | None) -> None:
    stored: Tensor = module.inv_freq
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, stored.device, seq_len=length
    )
    module.register_buffer("inv_freq", frequencies.to(stored), persistent=False)
    module.original_inv_freq = module.inv_freq
    module.attention_scaling = scaling
    module.rope_type = "default"  # a type whose frequencies transformers does not change
