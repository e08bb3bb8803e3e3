"""Keywords that a few families of transformers do not pass from their forward to attention and mixers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvant.attention.hook import ATTENTION_NAME

_STEP, _WINDOW = ATTENTION_NAME, "sliding_window"

_LACKING: Mapping[str, tuple[str, ...]] = {
    "jamba": (_STEP,),
    "lfm2": (_STEP,),  # before transformers 5.22
    "lfm2_moe": (_STEP,),
    "lfm2_vl": (_STEP,),
    "nemotron": (_STEP,),
    "phimoe": (_WINDOW,),  # its mask has the window, its attention call lacks it
    "stablelm": (_STEP,),
}
"""By model_type: keywords that attention or a mixer needs and the family's decoder layer does not pass."""


@contextmanager
def handing_over(module: PreTrainedModel, step: object) -> Iterator[None]:
    """Inside, this thread's forwards of `module` also pass these keywords to attention and mixers."""
    lacking = _LACKING.get(module.config.model_type, ())
    if not lacking:
        yield
        return
    given: dict[str, Any] = {}
    if _STEP in lacking:
        given[_STEP] = step
    if _WINDOW in lacking:
        given[_WINDOW] = module.config.get_text_config(decoder=True).sliding_window
    own = threading.get_ident()

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        return (args, {**kwargs, **given}) if threading.get_ident() == own else None

    handles = [
        part.register_forward_pre_hook(add, with_kwargs=True)
        for name, part in module.named_modules()
        if name.endswith((".self_attn", ".mamba", ".conv"))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
