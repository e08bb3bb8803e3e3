"""Rules for names of tensors in files agree with transformers', for listed and for probed families."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from kvant.models.classes import auto_class
from kvant.models.geometry.families import FAMILIES
from kvant.models.geometry.renaming import OF_EXPERTS, NameRules
from kvant.models.probe import name_rules
from tests.models import families

_LISTED = {
    name: family.names
    for family in FAMILIES
    for name in family.model_types
    if family.names is not None and name != "mimo_v2_flash"  # lower versions have other rules
}
_PLACES = ("", "model.", "model.model.", "language_model.", "language_model.model.")


def _made(name: str) -> PreTrainedModel:
    if name not in CONFIG_MAPPING or families.too_old(name):
        pytest.skip("the installed transformers lacks it")
    config = families.tiny_config(name)
    with torch.device("meta"):
        made = auto_class(config).from_config(config)
    assert isinstance(made, PreTrainedModel)
    return made


def _names(module: PreTrainedModel) -> Iterator[str]:
    """Names as in published files, of the modules, and at other places."""
    state = module.state_dict()
    for name in (*revert_weight_conversion(module, state), *state):
        yield name
        inside = re.sub(r"^(model\.|language_model\.)*", "", name)
        yield from (place + inside for place in _PLACES)


@pytest.mark.parametrize("name", _LISTED)
def test_a_listed_family_has_the_rules_of_its_class(name: str) -> None:
    module, rules = _made(name), _LISTED[name]
    theirs, weights = name_rules(module), module.state_dict().keys()
    assert rules is not None
    assert theirs is not None
    for one in dict.fromkeys(_names(module)):
        found, expected = rules.weights_of(one, weights), theirs.weights_of(one, weights)
        assert weights & set(found) == weights & set(expected), one


@pytest.mark.parametrize(
    "name", ["gemma3", "qwen3_5_moe", "ernie4_5_vl_moe", "minimax_m3_vl", "molmo2", "qwen2_vl", "gpt_neox"]
)  # fmt: skip
def test_names_are_read_as_transformers_reads_them(name: str) -> None:
    module = _made(name)
    rules, state = name_rules(module), module.state_dict()
    assert rules is not None
    transforms = get_model_conversion_mapping(module)
    kinds = [
        [one for one in transforms if isinstance(one, kind)]
        for kind in (WeightRenaming, WeightConverter)
    ]
    for one in dict.fromkeys(_names(module)):
        expected, _ = rename_source_key(one, *kinds, module.base_model_prefix, state)
        expected = one if expected not in state and one in state else expected
        found = rules.weights_of(one, state.keys())
        assert (found[0] if found[0] in state else None) == (
            expected if expected in state else None
        )


def test_a_weight_that_is_joined_of_parts_needs_all_of_them() -> None:
    rules, weights = NameRules(OF_EXPERTS), {"layers.0.mlp.experts.gate_up_proj"}
    gate, up = (f"layers.0.mlp.experts.0.{part}_proj.weight" for part in ("gate", "up"))
    assert rules.read([gate], weights) == frozenset()
    assert rules.read([gate, up], weights) == weights
    assert rules.read(weights, weights) == weights
