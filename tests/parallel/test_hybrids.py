"""Two ranks answer as one device does where layers carry states, or store latents of all heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant.errors import NotServable
from tests.models import families
from tests.models.tiny_narrow_experts import build_nested
from tests.parallel.test_equality import GREEDY, make, tokens
from tests.parallel.test_plan import plan

HYBRIDS = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
LATENTS = ("deepseek_v2", "deepseek_v3")


def _slow(names: tuple[str, ...]) -> list[object]:
    return [names[0], *(pytest.param(name, marks=pytest.mark.slow) for name in names[1:])]


@pytest.mark.parametrize("name", [*_slow(HYBRIDS), *_slow(LATENTS)])
def test_two_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    families.build(name, tmp_path / "model")
    two, one = (make(tmp_path / "model", size) for size in (2, 1))
    assert tokens(two) == tokens(one)


def test_two_ranks_give_the_tokens_of_one_beside_a_vision_encoder(tmp_path: Path) -> None:
    _, exact, _ = build_nested(tmp_path, "qwen3_5_moe")
    two, one = (make(exact, size) for size in (2, 1))
    assert tokens(two) == tokens(one)


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "bfloat16"])
def test_latents_of_other_formats_in_batch_invariant_mode(dtype: str, tmp_path: Path) -> None:
    families.build("deepseek_v3", tmp_path / "model")
    options = {"kv_cache_dtype": dtype, "batch_invariant": True}
    two, one = (make(tmp_path / "model", size, **options) for size in (2, 1))
    assert tokens(two) == tokens(one)


def test_kept_states_are_found_by_every_rank(tmp_path: Path) -> None:
    families.build("qwen3_5_text", tmp_path / "model")
    prompt = [(7 * i + i * i) % 120 + 3 for i in range(300)]
    two, one = (make(tmp_path / "model", size) for size in (2, 1))
    (expected,) = one.generate([prompt], GREEDY)
    computed = []
    for _ in range(2):
        (found,) = two.generate([prompt], GREEDY)
        assert found.token_ids == expected.token_ids
        computed.append(two.engine.stats.num_computed_tokens)
    assert computed[1] - computed[0] < 100


def test_states_are_divided_by_heads(tmp_path: Path) -> None:
    families.build("qwen3_5_text", tmp_path / "model")
    one, two = (plan(tmp_path / "model", size) for size in (1, 2))
    assert two.rank_kv.bytes_per_sequence * 2 == one.rank_kv.bytes_per_sequence
    four = plan(tmp_path / "model", 4)
    assert four.division is not None
    assert any("2 ranks hold each of the 2" in line for line in four.division.replicated)
    with pytest.raises(NotServable, match="4 heads of its recurrent layers do not divide"):
        plan(tmp_path / "model", 8)


@pytest.mark.parametrize(
    "name",
    [
        "bamba",  # gated norms over groups that two ranks share
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("qwen3_next", marks=pytest.mark.slow),  # joined projections, head by head
        pytest.param("nemotron_h", marks=pytest.mark.slow),
        pytest.param("falcon_h1", marks=pytest.mark.slow),
    ],
)
def test_heads_of_keys_fewer_than_ranks_are_replicated(name: str, tmp_path: Path) -> None:
    if families.too_old(name):
        pytest.skip("the installed transformers is older than the family needs")
    families.build(name, tmp_path / "model")
    four, one = (make(tmp_path / "model", size) for size in (4, 1))
    assert tokens(four) == tokens(one)


def test_latents_are_replicated_and_said_so(tmp_path: Path) -> None:
    families.build("deepseek_v3", tmp_path / "model")
    one, two = (plan(tmp_path / "model", size) for size in (1, 2))
    assert one.page_bytes == two.page_bytes
    assert two.division is not None
    assert any("latents: every rank stores" in line for line in two.division.replicated)
