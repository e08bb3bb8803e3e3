"""Loading without transformers' own progress bars, log lines and warnings; Kvant reports itself."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from logging import ERROR
from typing import Any

from transformers.utils import logging

_alone = threading.RLock()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and all logs but errors in this context.

    One thread at a time, others wait: verbosity, bars and warning filters are process-wide, and so is the
    dtype that transformers makes the default one while it loads weights.
    """
    with _alone:
        verbosity = logging.get_verbosity()
        hook = logging.set_tqdm_hook(_without_bar)
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
    """Suppress standard error in this context if `applies`: these bars have no switch."""
    with redirect_stderr(StringIO()) if applies else nullcontext():
        yield


def _without_bar(
    factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> object:
    return factory(*arguments, **{**options, "disable": True})
