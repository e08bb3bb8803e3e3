"""What tests on a GPU share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

_WARNING = "Synchronization debug mode is a prototype feature"


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise if a call in the block makes the host wait for the GPU. The mode is off again afterwards.

    torch warns once that the mode finds only most of such calls. The suite turns warnings into errors, and
    torch raises this one after it has set the mode.
    """
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode("default")


def _set_mode(mode: Literal["default", "error"]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_WARNING)
        torch.cuda.set_sync_debug_mode(mode)
