"""Rotary frequencies that do not depend on what else is in a batch.

transformers recomputes the frequencies of `longrope` and `dynamic` models in every forward, from
the largest position it sees. In a packed batch that would let one long sequence change the others'
tokens, and keys stored before the switch would no longer fit. Kvant fixes them once, for the
longest sequence it will serve (as vLLM does for longrope).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvant.errors import NotServable

# Prefixes that transformers gives to rope types whose frequencies move.
_MOVING = ("dynamic", "longrope")


def fix_frequencies(model: nn.Module, max_model_len: int | None) -> None:
    """Set every moving rotary embedding of `model` to what it is at `max_model_len` positions."""
    for name, module in model.named_modules():
        rope_type: Any = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict) and any(map(_moves, rope_type.values())):
            raise NotServable(
                f"{name} has rotary frequencies that move, and of several types",
                why="they would depend on the longest sequence in the batch",
            )
        if isinstance(rope_type, str) and _moves(rope_type):
            _fix(module, rope_type, max_model_len)


def _moves(rope_type: str) -> bool:
    return any(word in rope_type for word in _MOVING)


def _fix(module: Any, rope_type: str, max_model_len: int | None) -> None:
    stored: Tensor = module.inv_freq
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, stored.device, seq_len=max_model_len
    )
    module.register_buffer("inv_freq", frequencies.to(stored), persistent=False)
    module.original_inv_freq = module.inv_freq
    module.attention_scaling = scaling
    module.rope_type = "default"  # a type that transformers does not move
