"""What loading keeps quiet, and that everything speaks again afterwards."""

from __future__ import annotations

import threading
import warnings

from transformers.utils import logging

from kvant.models.quiet import quiet_transformers


def test_models_that_are_loaded_by_several_threads_leave_everything_as_it_was() -> None:
    verbosity, filters = logging.get_verbosity(), list(warnings.filters)
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def first() -> None:
        with quiet_transformers():
            first_is_in.set()
            second_is_in.wait(0.3)  # it ends before the second one, if that came in between

    def second() -> None:
        first_is_in.wait(10)
        with quiet_transformers():
            second_is_in.set()
            begun.join(10)

    begun, beside = threading.Thread(target=first), threading.Thread(target=second)
    for thread in (begun, beside):
        thread.start()
    for thread in (begun, beside):
        thread.join(20)
    assert logging.get_verbosity() == verbosity
    assert warnings.filters == filters
