"""Hides transformers' own progress bars, log lines and warnings, since Kvant reports progress itself."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import partial
from io import StringIO
from logging import ERROR
from typing import Any

from transformers.utils import logging

_alone = threading.RLock()


OnProgress = Callable[[float], None]
"""Called with the share of a model's tensors that are loaded, 0 to 1."""


@contextmanager
def quiet_transformers(on_progress: OnProgress | None = None) -> Iterator[None]:
    """Hides transformers' bars and all logs except errors in this context.

    on_progress: called while weights are loaded, at most about a hundred times for a model.
    Admits one thread at a time, because verbosity, bars and warning filters are process-wide. So is the
    default dtype, which transformers changes while it loads weights.
    """
    with _alone:
        verbosity = logging.get_verbosity()
        hook = logging.set_tqdm_hook(partial(_without_bar, on_progress))
        logging.set_verbosity(ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.set_tqdm_hook(hook)
            logging.set_verbosity(verbosity)


@contextmanager
def quiet_compressed_tensors(applies: bool) -> Iterator[None]:
    """Suppresses standard error in this context if `applies`, since these bars have no switch."""
    with redirect_stderr(StringIO()) if applies else nullcontext():
        yield


def _without_bar(
    on_progress: OnProgress | None,
    factory: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> object:
    if on_progress is not None and options.get("desc") == "Loading weights" and arguments:
        arguments = (_Counted(arguments[0], on_progress), *arguments[1:])
    return factory(*arguments, **{**options, "disable": True})


class _Counted:
    """Iterates over items, and calls `on_progress` with the share that has passed, once for each percent."""

    def __init__(self, items: Iterable[Any], on_progress: OnProgress) -> None:
        self._items = list(items)
        self._on_progress = on_progress

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        before = 0
        for place, item in enumerate(self._items):
            if (percent := 100 * place // len(self._items)) > before:
                before = percent
                self._on_progress(place / len(self._items))
            yield item
        self._on_progress(1.0)
