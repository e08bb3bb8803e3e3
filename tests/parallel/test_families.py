"""Two ranks answer as one device does, for every family that ranks divide."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant.models.fused.recipes import RECIPES
from kvant.models.sharding.cuts import RULES
from tests.models import families
from tests.parallel.test_equality import make, tokens

FAST = ("cohere", "gpt_neox", "granitemoehybrid", "falcon_h1", "lfm2", "jamba")
FAMILIES = sorted(set(RULES) & set(families.FAMILIES))


def test_every_family_of_the_decoder_is_divided() -> None:
    """Text models of multimodal ones go by the latter's name."""
    wanted = {name.removesuffix("_text") if "_vl_" in name else name for name in RECIPES}
    assert wanted <= set(RULES)
    assert set(RULES) <= {*FAMILIES, "qwen3_5", "qwen3_5_moe"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in FAMILIES]
)
def test_two_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    if families.too_old(name):
        pytest.skip("the installed transformers is older than the family needs")
    two, one = (make(_built(name, tmp_path), size) for size in (2, 1))
    assert tokens(two) == tokens(one)
    assert two.planned.weights_bytes is not None
    assert one.planned.weights_bytes is not None
    assert two.planned.weights_bytes < one.planned.weights_bytes


_FEWER_HEADS = {"helium": 4, "kimi_linear": 4, "qwen2_vl": 2, "qwen2_5_vl": 2}
"""The most ranks for which these families have a tiny model."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_more_ranks_give_the_tokens_of_one(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four or eight ranks for two KV heads, and for two heads of keys of a recurrence."""
    if families.too_old(name):
        pytest.skip("the installed transformers is older than the family needs")
    if size > _FEWER_HEADS.get(name, size):
        pytest.skip("no tiny model of this family has as many heads")
    if size == 8:
        for count in families.COUNTS_OF_4:
            monkeypatch.setitem(families._TINY, count, 8)
    many, one = (make(_built(name, tmp_path), ranks) for ranks in (size, 1))
    assert tokens(many) == tokens(one)


def _built(name: str, directory: Path) -> Path:
    """A tiny model of the family, made with the first call."""
    path = directory / "model"
    if not path.exists():
        families.build(name, path)
        if name == "olmo_hybrid":
            families.divide_filters(path)
    return path
