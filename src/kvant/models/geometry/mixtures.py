"""Refuses layers of experts that make no sense, in config.json and in the names of a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvant.errors import BadCheckpoint, WayOut
from kvant.models.geometry.declared import left_out
from kvant.models.geometry.fields import Fields, text_section

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields that say how many experts a layer has."""

_CHOSEN_FIELDS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k_experts",
)
"""Fields that say how many experts a token has."""

_STORED_APART = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)\.[^.]+")
"""The name of one expert's tensor: the layer's experts, the expert, the product."""

_MOST_SHOWN = 3


def check_mixture(config: Mapping[str, Any]) -> None:
    """Raises BadCheckpoint, naming field and value, if experts cannot be chosen as config.json says.

    A field that is missing or no whole number is left to the family's own checks.
    """
    given = text_section(config)
    fields = Fields(given, section="" if given is config else "text_config.")
    text = {**left_out(given, str(given.get("model_type"))), **given}
    count = _count(given)
    for name in EXPERT_FIELDS:
        if type(given.get(name)) is bool:
            raise fields.bad(name, "it must be a whole number")
    if count is None:
        return
    for name in EXPERT_FIELDS:
        if _whole(given, name) not in (None, count):
            raise fields.bad(name, f"another field says that a layer has {count} experts")
    for name in _CHOSEN_FIELDS:
        chosen = _whole(text, name)
        if chosen is not None and not 1 <= chosen <= count:
            raise fields.bad(name, f"a token has from 1 to all {count} experts")
    groups = _whole(text, "n_group")
    if groups is not None and (groups < 1 or count % groups):
        raise fields.bad("n_group", f"{count} experts are not divided into groups of equal size")
    kept = _whole(text, "topk_group")
    if groups is not None and kept is not None and not 1 <= kept <= groups:
        raise fields.bad("topk_group", f"a token has from 1 to all {groups} groups")


def refuse_lacking_experts(
    config: Mapping[str, Any], names: Iterable[str], directory: Path
) -> BadCheckpoint | None:
    """Returns the error for a checkpoint that stores experts apart and lacks some; None if it lacks none.

    names: of its tensors. An expert whose product is stored in another format counts as stored.
    """
    stored: dict[tuple[str, str], set[int]] = {}
    for name in names:
        found = _STORED_APART.fullmatch(name)
        if found is not None:
            layer, expert, product = found.groups()
            stored.setdefault((layer, product), set()).add(int(expert))
    if not stored:
        return None
    count = _count(text_section(config)) or 1 + max(max(experts) for experts in stored.values())
    lacking = [
        f"{layer}.{expert}.{product}"
        for (layer, product), experts in sorted(stored.items())
        for expert in range(count)
        if expert not in experts
    ]
    if not lacking:
        return None
    more = ", .." if len(lacking) > _MOST_SHOWN else ""
    return BadCheckpoint(
        f"{directory} lacks {len(lacking)} weights of experts: {', '.join(lacking[:_MOST_SHOWN])}{more}",
        why=f"each layer has {count} experts",
        ways_out=(WayOut("fetch the missing files from where the model came"),),
    )


def _count(text: Mapping[str, Any]) -> int | None:
    """Returns the number of experts of a layer, None for a model without any or with numbers that differ."""
    found = (_whole(text, name) for name in (*EXPERT_FIELDS, "moe_num_experts"))
    return next((count for count in found if count), None)


def _whole(text: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name)
    return value if type(value) is int else None
