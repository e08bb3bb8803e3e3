"""Where a model's shape comes from, what is kept of a probe, and what the plan shows of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

import kvant
from kvant import LLM, SamplingParams
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, NotServable
from kvant.models import read_shape as reading
from kvant.models.geometry import read_geometry
from kvant.models.geometry.mixtures import check_mixture
from kvant.models.geometry.read import refuse_absurd
from kvant.models.probe import Probed, probe
from kvant.models.read_shape import read_shape
from kvant.models.shape import ShapeSource
from kvant.plan.plan import PlanRequest
from kvant.plan.plan_json import plan_json
from tests.models import configs, families, tiny
from tests.planned import plan_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))


def config(name: str, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(families.tiny_config(name).to_json_string(use_diff=False))
    return {**made, "model_type": name, **changes}


@pytest.mark.parametrize("name", [n for n in tiny.FAMILIES if n not in ("gemma3n", "gemma4")])
def test_a_probe_finds_what_geometry_reads_from_the_config(name: str) -> None:
    said = json.loads(tiny.config_of(name).to_json_string(use_diff=False))
    assert probe(said).geometry.layers == read_geometry(said).layers


def test_a_listed_family_is_read_from_its_config() -> None:
    assert read_shape(configs.tiny("llama")).source is ShapeSource.CONFIG


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (
            "granitemoe",
            {"attention_multiplier": None},
            "null in the place of the number that scales",
        ),
        ("kimi_linear", {"num_attention_heads": 0}, "0 heads of queries"),
        ("lfm2", {"conv_L_cache": 1}, "layer 0 has a convolution over one token"),
    ],
)
def test_numbers_without_which_a_probed_model_does_not_start_are_refused(
    name: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(NotServable, match=says):
        probe(config(name, **changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 2**40),
        ("num_local_experts", 2**40),
        ("n_positions", 2**40),
        ("logits_scaling", 0),
        ("rms_norm_eps", math.nan),
    ],
)
def test_absurd_numbers_are_refused_before_a_probe(field: str, value: float) -> None:
    with pytest.raises(BadCheckpoint, match=field) as refused:
        read_shape(config("granitemoe", **{field: value}))
    assert refused.value.ways_out


@pytest.mark.parametrize("value", [False, 0, 3])
def test_numbers_of_experts_that_contradict_each_other_are_refused(value: int) -> None:
    said = {**config("qwen3_moe"), "num_experts": 4, "num_local_experts": value}
    with pytest.raises(BadCheckpoint, match="num_local_experts") as refused:
        read_shape(said)
    assert ("a whole number" if value is False else "4 experts") in refused.value.why
    assert refused.value.ways_out


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": None},
        {"head_dim": 1},
    ],
)
def test_heads_of_one_number_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match="one number each") as refused:
        read_shape(config("llama", **changes))
    assert refused.value.ways_out


def test_no_familys_own_numbers_are_absurd() -> None:
    for name in families.FAMILIES:
        if name in CONFIG_MAPPING:
            said = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
            refuse_absurd(said)
            check_mixture(said)


def test_a_probe_is_kept_and_a_broken_file_is_probed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = config("gemma")
    first = read_shape(said)
    assert first.source is ShapeSource.PROBED
    (kept,) = (tmp_path / "cache" / "probes").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("kvant.models.probe.probe", None)  # calling it would be a TypeError
        assert read_shape(said) == first
    kept.write_text(kept.read_text()[:40])
    assert read_shape(said) == first
    assert read_shape({**said, "num_hidden_layers": 2}).geometry.layers == first.geometry.layers[:2]


def test_a_probe_by_another_code_is_made_again_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "kvant"
    for name in ("models/probe.py", "models/recurrent/mixers.py", "kv/geometry.py", "cli/main.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("a")
    monkeypatch.setattr(kvant, "__file__", str(package / "__init__.py"))
    said, probed = config("gemma"), []

    def makes_again(changed: str | None) -> bool:
        if changed is not None:
            (package / changed).write_text("b")
        reading._maker.cache_clear()
        before = len(probed)
        read_shape(said)
        return len(probed) > before

    def counted(config: Mapping[str, Any]) -> Probed:
        probed.append(config)
        return probe(config)

    monkeypatch.setattr("kvant.models.probe.probe", counted)
    try:
        assert makes_again(None)
        assert not makes_again(None)
        for name in ("models/probe.py", "models/recurrent/mixers.py", "kv/geometry.py"):
            assert makes_again(name), name
        assert not makes_again("cli/main.py"), "no part of a probe"
        monkeypatch.setattr(reading, "version", lambda name: "another")
        assert makes_again(None), "another transformers"
    finally:
        reading._maker.cache_clear()
    assert len(list((tmp_path / "cache" / "probes").iterdir())) == 1, "old results are replaced"


def test_an_unknown_model_type_is_called_unknown() -> None:
    with pytest.raises(BadCheckpoint, match="unknown model_type 'sorcery'"):
        read_shape({"model_type": "sorcery", "architectures": ["LlamaForCausalLM"]})


def test_a_model_without_a_head_for_text_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="GemmaForSequenceClassification"):
        read_shape(config("gemma", architectures=["GemmaForSequenceClassification"]))


def test_a_family_that_was_not_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "compared", lambda: {"smollm3": None})
    with pytest.raises(BadCheckpoint, match=r"unknown model_type 'gemma'") as refused:
        read_shape(config("gemma"))
    assert "smollm3" in str(refused.value)
    assert refused.value.ways_out


def test_a_family_that_differs_from_transformers_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "compared", lambda: {"gemma": "58 of 96 greedy tokens"})
    with pytest.raises(NotServable, match="58 of 96"):
        read_shape(config("gemma"))


def test_a_probed_model_is_planned_with_its_bytes_and_runs(tmp_path: Path) -> None:
    said = families.build("aria", tmp_path / "model")
    assert not read_shape(said).geometry.not_runnable
    made = plan_of(PlanRequest(str(tmp_path / "model"), DeviceFacts(DeviceKind.CPU)))
    body = plan_json(made)
    assert body["geometry_source"] == "probed from transformers' own forward"
    assert body["forward"]["name"] == "transformers"
    assert made.can_run
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(said))
    counted = plan_of(PlanRequest(str(bare), DeviceFacts(DeviceKind.CPU))).target.weights
    assert counted.bytes == made.target.weights.bytes
    llm = LLM(tmp_path / "model", max_model_len=64, attention_backend="reference")
    found = llm.generate([[3, 17, 5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(found[0].token_ids) == 4
