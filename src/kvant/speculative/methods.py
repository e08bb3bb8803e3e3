"""The methods of speculative decoding, as planning sees them: without torch and weights.

A new method is one file with `build(setting: Setting) -> Proposer` and a `Method`, and an entry in METHODS.
A method outside Kvant is named by its module and variable: `"method": "my_module:MY_METHOD"`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvant.errors import BadValue, UnknownName


@dataclass(frozen=True, slots=True)
class Method:
    """A method of drafting and its configuration.

    module: the module with `build`, imported only when the engine is made. has_model: it loads a drafter
    (`model` in the configuration), planned like the target. num_speculative_tokens: the default; None takes
    as many as the drafter's block allows. options: the method's own keys, counts of 1 or more, with defaults.
    """

    name: str
    module: str
    has_model: bool
    num_speculative_tokens: int | None = None
    options: Mapping[str, int] = field(default_factory=dict)


DFLASH = Method("dflash", "kvant.speculative.dflash.proposer", has_model=True)
NGRAM = Method(
    "ngram",
    "kvant.speculative.ngram",
    has_model=False,
    num_speculative_tokens=4,
    options={"prompt_lookup_min": 2, "prompt_lookup_max": 4},
)

METHODS = (DFLASH, NGRAM)


def find_method(name: str, *, asked_by: str) -> Method:
    """Returns a method by its name or by `module:attribute`. Raises UnknownName or BadValue."""
    for method in METHODS:
        if method.name == name:
            return method
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownName("method", name, [m.name for m in METHODS], asked_by=asked_by)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as fault:
        raise BadValue(f"{asked_by}: no method {name!r}", why=str(fault)) from fault
    if not isinstance(found, Method):
        raise BadValue(
            f"{asked_by}: {name!r} is no method",
            why=f"it is a {type(found).__name__}, not a kvant.speculative.methods.Method",
        )
    return found
