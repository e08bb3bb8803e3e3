"""What one declaration says, before several of them are compared.

A checkpoint may declare its KV cache more than once: in `config.json` at the top or for the text
part, and again in `hf_quant_config.json`. A declaration that does not mention the KV cache is no
declaration: silence contradicts no other. Two that speak must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvant.kv.checkpoint.facts import UnreadableWish, Wish


@dataclass(frozen=True, slots=True)
class Declaration:
    """where: file and key. said: its text, for messages.

    scheme: the global wish, None where nothing is wished for. per_layer: wishes by module name.
    promises_open: whether scales are promised shows only in the weight files (ModelOpt).
    """

    where: str
    said: str
    scheme: Wish | None = None
    per_layer: Mapping[str, Wish] = field(default_factory=dict)
    promises_open: bool = False

    @property
    def meaning(self) -> Hashable:
        """What two declarations must share to agree, in any dialect."""
        if self.per_layer:
            return frozenset((name, _meaning(wish)) for name, wish in self.per_layer.items())
        return _meaning(self.scheme)


def _meaning(wish: Wish | None) -> Hashable:
    if isinstance(wish, UnreadableWish):
        return wish.asked
    return None if wish is None else (wish.k, wish.v)


Reader = Callable[[Mapping[str, Any], str], Declaration | None]
"""Reads one quantization_config; the text is its location. None: it does not mention KV."""


def unreadable(where: str, asked: str, why: str) -> Declaration:
    """Returns a declaration that cannot be read as a whole."""
    return Declaration(where, asked, UnreadableWish(where, asked, why))


def agreed(found: Sequence[Declaration]) -> Declaration | None:
    """Returns the declaration that all share; an unreadable one if they differ."""
    if not found:
        return None
    if len({declaration.meaning for declaration in found}) == 1:
        return found[0]
    where = " and ".join(declaration.where for declaration in found)
    said = "; ".join(f"{declaration.where} says {declaration.said}" for declaration in found)
    return unreadable(
        where,
        " against ".join(declaration.said for declaration in found),
        f"they disagree: {said}",
    )
