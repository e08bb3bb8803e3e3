"""What `kvant plan` says of ranks: bytes, what is replicated, what cannot be divided."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import ConfigError, NotServable
from kvant.plan.config import config_of
from kvant.plan.plan import Plan
from kvant.plan.plan_json import plan_json
from kvant.plan.planning import make_plan
from kvant.plan.read_facts import read_facts
from kvant.plan.resolution import what_if_weights
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
        ("qwen3_moe", 4, {"moe_intermediate_size": 46}, "width 46 of .*experts"),
        ("gemma4", 2, {}, "not gemma4_text"),
        (
            "llama", 2,
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}, "9 query heads",
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_with_ways_out_that_work(
    family: str, size: int, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path, **options)
    with pytest.raises(NotServable, match=says) as refused:
        plan(path, size)
    for way in refused.value.ways_out:
        assert way.arguments[0] == "--tensor-parallel-size"
        plan(path, int(way.arguments[1]))
    assert len(refused.value.ways_out) == (1 if family == "gemma4" else 2)


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


def narrow(path: Path, declared: dict[str, Any]) -> Path:
    """Declare that the weights of a config are narrow."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": declared}))
    return path


def on_gpu(path: Path, size: int, **options: Any) -> Plan:
    """Return the plan of `size` ranks, each with an H100 of 80 GiB."""
    options = {"tensor_parallel_size": size, "device": "cpu", "dtype": "bfloat16", **options}
    asked = config_of(path, options).plan
    request = replace(asked, device=DeviceFacts(DeviceKind.CUDA, "sm_90"), memory_bytes=80 << 30)
    return make_plan(request, read_facts(request))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("declared", [AWQ, FP8], ids=["awq", "fp8"])
def test_bytes_of_a_rank_with_narrow_weights(qwen3_8b: Path, declared: dict[str, Any]) -> None:
    narrow(qwen3_8b, declared)
    one, two, four = (on_gpu(qwen3_8b, size) for size in (1, 2, 4))
    hidden, vocab, layers = 4096, 151936, 36
    kept = 2 * ((1 + 2 * layers) * hidden + layers * 2 * 128 + vocab * hidden)
    assert one.weights_bytes is not None
    divided = one.weights_bytes - kept
    for plan_of_rank, size in ((two, 2), (four, 4)):
        assert plan_of_rank.weights_bytes == pytest.approx(kept + divided / size, rel=1e-6)
    assert two.forward.stored is not None


@pytest.mark.parametrize(
    ("changes", "declared", "says"),
    [
        ({}, {**AWQ, "group_size": 64}, None),
        ({"intermediate_size": 12288 + 128}, AWQ, "groups of 128 inputs of .*down_proj"),
        ({"intermediate_size": 12288 + 128}, FP8, "groups of 128 outputs of .*_proj"),
        ({"head_dim": 64}, FP8, None),
        ({"head_dim": 64, "num_key_value_heads": 2}, FP8, None),  # each head within one block
        ({"head_dim": 96, "num_key_value_heads": 2}, FP8, "groups of 128 outputs of .*k_proj"),
    ],
)
def test_groups_that_ranks_would_cut_are_refused_by_name(
    qwen3_8b: Path, changes: dict[str, Any], declared: dict[str, Any], says: str | None
) -> None:
    config = json.loads((qwen3_8b / "config.json").read_text())
    (qwen3_8b / "config.json").write_text(json.dumps({**config, **changes}))
    narrow(qwen3_8b, declared)
    if says is None:
        assert on_gpu(qwen3_8b, 2).division is not None
        return
    with pytest.raises(NotServable, match=says) as refused:
        on_gpu(qwen3_8b, 2)
    for way in refused.value.ways_out:
        on_gpu(qwen3_8b, int(way.arguments[1]))


def test_weights_that_are_rounded_while_they_are_loaded_are_divided(qwen3_8b: Path) -> None:
    for asked in ("fp8", "int8", "int4", "fp8_dynamic"):
        one, two = (on_gpu(qwen3_8b, size, quantization=asked) for size in (1, 2))
        assert one.weights_bytes is not None
        assert two.weights_bytes is not None
        assert two.division is not None
        whole = two.division.whole_bytes  # with a head that is not rounded
        assert whole is not None
        assert one.weights_bytes < whole
        assert two.weights_bytes < 0.65 * whole  # the embedding is replicated
        for size, chosen in ((1, one), (2, two)):  # what the table of alternatives says
            _, rows = what_if_weights(on_gpu(qwen3_8b, size))
            (row,) = (row for row in rows if row.asked is not None and row.asked.value == asked)
            assert row.weights_bytes == chosen.weights_bytes


def test_narrow_weights_that_would_be_decoded_are_refused(tmp_path: Path) -> None:
    path = narrow(tiny.build("llama", tmp_path), FP8)
    with pytest.raises(NotServable, match="where they run as they are stored"):
        plan(path, 2)


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"quantization": "int4"}])
def test_narrow_experts_are_divided_in_whole_groups(
    options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3-30b-a3b.json").read_text())
    if not options:
        narrow(tmp_path, FP8)
    one, two = (on_gpu(tmp_path, size, **options) for size in (1, 2))
    assert one.weights_bytes is not None
    assert two.weights_bytes is not None
    assert two.weights_bytes < 0.6 * one.weights_bytes
    if not options:  # 768 / 4 numbers are no whole blocks of 128
        with pytest.raises(NotServable, match=r"groups of 128 .* of .*experts"):
            on_gpu(tmp_path, 4)
