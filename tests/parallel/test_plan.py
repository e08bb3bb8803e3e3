"""What `kvant plan` says of ranks: bytes, what is replicated, what cannot be divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant.errors import ConfigError, NotServable
from kvant.plan.config import config_of
from kvant.plan.plan import Plan
from kvant.plan.plan_json import plan_json
from kvant.plan.planning import make_plan
from kvant.plan.read_facts import read_facts
from tests.models import tiny

CONFIGS = Path(__file__).parents[1] / "configs"


def plan(path: Path, size: int, **options: Any) -> Plan:
    request = config_of(path, {"tensor_parallel_size": size, "device": "cpu", **options}).plan
    return make_plan(request, read_facts(request))


@pytest.fixture
def qwen3_8b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3-8b.json").read_text())
    return tmp_path


def test_bytes_of_a_rank(qwen3_8b: Path) -> None:
    one, four = plan(qwen3_8b, 1, dtype="bfloat16"), plan(qwen3_8b, 4, dtype="bfloat16")
    hidden, vocab, layers = 4096, 151936, 36
    whole = (1 + 2 * layers) * hidden + layers * 2 * 128 + vocab * hidden  # norms and embedding
    divided = vocab * hidden + layers * (2 * hidden * 4096 + 2 * hidden * 1024 + 3 * hidden * 12288)
    assert one.weights_bytes == 2 * (whole + divided)
    assert four.weights_bytes == 2 * (whole + divided // 4)
    assert one.page_bytes == 4 * four.page_bytes
    assert one.target.kv.fingerprint == four.target.kv.fingerprint
    body = plan_json(four)["tensor_parallel"]
    assert body["size"] == 4
    assert body["whole_weights_bytes"] == one.weights_bytes
    assert body["bytes_per_token_of_rank"] * 4 == one.target.kv.bytes_per_token


def test_kv_heads_fewer_than_ranks_are_replicated_and_said_so(qwen3_8b: Path) -> None:
    eight, sixteen = plan(qwen3_8b, 8), plan(qwen3_8b, 16)
    assert eight.page_bytes == sixteen.page_bytes
    assert eight.division is not None
    assert sixteen.division is not None
    assert not any("KV heads" in line for line in eight.division.replicated)
    assert any("2 ranks store each of the 8" in line for line in sixteen.division.replicated)


@pytest.mark.parametrize(
    ("family", "size", "options", "says"),
    [
        ("llama", 3, {}, "4 query heads do not divide"),
        ("llama", 8, {}, "4 query heads do not divide"),
        ("qwen3_moe", 4, {"moe_intermediate_size": 46}, "moe_intermediate_size 46"),
        ("gemma4", 2, {}, "not gemma4_text"),
    ],
)
def test_what_does_not_divide_is_refused_with_ways_out_that_work(
    family: str, size: int, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path, **options)
    with pytest.raises(NotServable, match=says) as refused:
        plan(path, size)
    for way in refused.value.ways_out:
        assert way.arguments[0] == "--tensor-parallel-size"
        plan(path, int(way.arguments[1]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantization": "int8_weight_only", "dtype": "float32"}, "int8_weight_only"),
        ({"speculative_config": {"method": "tests.speculative.sharing:METHOD"}}, "sharing"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tiny.build("llama", tmp_path)
    with pytest.raises(ConfigError, match=says):
        plan(path, 2, **options)


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotServable, match="weights quantised by fp8 are not divided"):
        plan(path, 2)
