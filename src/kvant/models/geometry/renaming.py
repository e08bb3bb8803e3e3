"""Rules for names: which weight transformers reads a tensor of a file as. No torch.

A class has rules for names. Published files have other names than its modules, or store the experts of a
layer one by one. A tensor that no rule brings to a weight is not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Renaming:
    r"""One rule, in transformers' form.

    pattern: with a named group for each source; the first place where it is found is replaced. targets: what
    stands there then; \1 is the first group inside of the source. begins: the rule reads names that begin so,
    and only what follows; () for any name. joins: all sources together become all targets, and no further
    rule follows.
    """

    pattern: str
    targets: tuple[str, ...]
    begins: tuple[str, ...] = ()
    joins: bool = False

    @property
    def num_sources(self) -> int:
        return len(_compiled(self.pattern).groupindex)

    def apply(self, name: str) -> tuple[str, str] | None:
        """Returns the name with the first target, and the source that was found; None if none is."""
        begin = next((one for one in self.begins if name.startswith(one)), None)
        if begin is None and self.begins:
            return None
        rest = name.removeprefix(begin or "")
        found = _compiled(self.pattern).search(rest)
        if found is None:
            return None
        source = next(one for one, text in found.groupdict().items() if text is not None)
        target = self.targets[0]
        if r"\1" in target:
            target = target.replace(r"\1", found[found.re.groupindex[source] + 1])
        return (begin or "") + rest.replace(found[0], target, 1), source


@dataclass(frozen=True, slots=True)
class NameRules:
    """How a class reads names. base: the name of its part without a head, which names may have or lack."""

    rules: tuple[Renaming, ...] = ()
    base: str = "model"

    def read(self, names: Iterable[str], weights: Collection[str]) -> frozenset[str]:
        """Returns the weights that tensors with these names are read as. weights: all of the model."""
        whole: set[str] = set()
        parts: dict[tuple[str, Renaming], set[str]] = {}
        for name in names:
            made, rule, source = self._read(name, weights)
            if rule is None:
                whole.update(made)
            else:
                for one in made:
                    parts.setdefault((one, rule), set()).add(source)
        whole.update(one for (one, rule), found in parts.items() if len(found) == rule.num_sources)
        return frozenset(whole)

    def weights_of(self, name: str, weights: Collection[str]) -> tuple[str, ...]:
        """Returns the weights that a tensor is read as, or is a part of; other names if it is not read."""
        return self._read(name, weights)[0]

    def _read(
        self, name: str, weights: Collection[str]
    ) -> tuple[tuple[str, ...], Renaming | None, str]:
        renamed = name
        for rule in self.rules:
            if not rule.joins:
                renamed = (rule.apply(renamed) or (renamed,))[0]
        joins = ((rule, rule.apply(renamed)) for rule in self.rules if rule.joins)
        joined = next(((rule, *made) for rule, made in joins if made is not None), None)
        first = self._placed(renamed if joined is None else joined[1], weights)
        if first not in weights and name in weights:
            return (name,), None, ""
        if joined is None:
            return (first,), None, ""
        rule, _, source = joined
        return tuple(first.replace(rule.targets[0], one) for one in rule.targets), rule, source

    def _placed(self, name: str, weights: Collection[str]) -> str:
        """Returns the name with or without the base, if the model has that one."""
        short, longer = name.removeprefix(f"{self.base}."), f"{self.base}.{name}"
        if short in weights:
            return short
        return longer if longer in weights else name


def renaming(*sources: str, to: str, joins: bool = False, begins: tuple[str, ...] = ()) -> Renaming:
    """Returns a rule for any of these sources, which end at the end of a part of the name."""
    pattern = "|".join(rf"(?P<g{index}>{one}(?!\w))" for index, one in enumerate(sources))
    return Renaming(pattern, (to,), begins, joins)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


OF_ALL = (
    renaming(
        r"^model\.language_model\.model",
        r"^language_model\.model\.model",
        to="model.language_model",
    ),
)
"""transformers' rules for every class. Rules for modules that no listed family has are left out."""

AS_MODULES = NameRules(OF_ALL)
"""Rules of a class whose files have the names of its modules."""

OF_EXPERTS = (
    renaming(
        r"mlp\.experts\..*\.gate_proj\.weight", r"mlp\.experts\..*\.up_proj\.weight",
        to="mlp.experts.gate_up_proj", joins=True,
    ),
    renaming(r"mlp\.experts\..*\.down_proj\.weight", to="mlp.experts.down_proj", joins=True),
)  # fmt: skip
"""Rules of most classes with experts, whose files have them one by one."""

WITH_EXPERTS = NameRules((*OF_EXPERTS, *OF_ALL))

OF_TEXT = (Renaming(r"(?P<g0>^model\.language_model\.(.+))", (r"model.\1",)),)
"""The rule of classes for the text model that read the files of the whole model."""
