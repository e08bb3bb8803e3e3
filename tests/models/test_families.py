"""Every decoder family of transformers runs and equals transformers, or is refused with its technique."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.kv.dtype import ComputeDtype
from kvant.models.geometry.families import is_listed
from kvant.models.read_shape import compared
from kvant.plan.plan import PlanRequest
from tests.models import families
from tests.models.families import ALL_EQUAL, FAMILIES, LOGITS_BOUND, NO_DECODERS, compare, too_old
from tests.planned import plan_of

ROOT = Path(__file__).parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "docs" / "models.json").read_text())
RECORDED: dict[str, Any] = RECORD["families"]

FAST = (
    "gemma",  # norms of 1 + w
    "smollm3",  # layers without positions
    "olmo3",  # windows
    "cohere2",  # a parallel residual
    "granitemoeshared",  # experts beside shared ones, multipliers
    "minicpm3",  # latent attention, expanded
    "phimoe",  # a window in the mask alone
    "stablelm",  # attention that gets no keywords
    "gpt2",  # learned positions
    "modernbert-decoder",  # an encoder's layers as a decoder
    "granite4_vision",  # a tower, masks made without a cache
    "qwen2_vl",  # rotary positions in three parts
    "bamba",  # Mamba2
    "kimi_linear",  # keys that decay each by itself, latent attention
    "jamba",  # Mamba1
    "minimax",  # linear attention whose decays are fixed
    "lfm2",  # convolutions alone
    "nemotron_h",  # layers that mix no tokens
    "olmo_hybrid",  # gated delta nets
)


@pytest.mark.parametrize("name", FAST)
def test_a_probed_family_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    if too_old(name):
        pytest.skip(f"{name} needs a newer transformers")
    assert not is_listed(name)
    found = compare(name, tmp_path / "model", quick=True)
    assert found.why is None
    ran = found.ran[ComputeDtype.FLOAT32]
    assert set(ran.equal.values()) == {ALL_EQUAL}
    assert ran.logits_error < LOGITS_BOUND[ComputeDtype.FLOAT32]


@pytest.mark.parametrize(
    "name",
    ["qwen2", "gemma2", pytest.param("lfm2", marks=pytest.mark.slow)],
)
def test_both_dtypes_the_cache_and_preemptions_give_them_too(name: str, tmp_path: Path) -> None:
    found = compare(name, tmp_path / "model")
    assert found.why is None
    assert set(found.ran) == set(LOGITS_BOUND)
    for dtype, ran in found.ran.items():
        assert ran.equal == dict.fromkeys(("whole", "pieces", "cached", "preempted"), ALL_EQUAL)
        assert ran.logits_error < LOGITS_BOUND[dtype]
        assert ran.hits
        assert ran.preemptions


@pytest.mark.parametrize(
    ("name", "technique"),
    [
        ("zaya", "recurrent or convolution states"),
        ("deepseek_v32", "indices"),
        ("llama4_text", "chunks"),
        ("diffllama", "more than once"),
        ("glm5_next", "mask"),
        ("zamba2", "index of a layer"),
        ("bloom", "takes no positions"),
        ("gptj", "does not go through transformers' interface"),
        ("paligemma", "not causal"),
    ],
)
def test_a_family_that_kvant_cannot_run_is_refused_by_the_technique_it_lacks(
    name: str, technique: str, tmp_path: Path
) -> None:
    found = compare(name, tmp_path / "model")
    assert found.forward is None
    assert technique in (found.why or "")


@pytest.mark.parametrize(
    ("name", "field"), [("nemotron_h", "mamba_hidden_act"), ("kimi_linear", "hidden_act")]
)
def test_a_recurrence_that_computes_no_silu_is_refused(
    name: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if too_old(name):
        pytest.skip(f"{name} needs a newer transformers")
    extra = {**families._EXTRA[name], field: "gelu"}
    monkeypatch.setitem(families._EXTRA, name, extra)
    assert "computes gelu" in (compare(name, tmp_path / "model", quick=True).why or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_fares_as_recorded(name: str, tmp_path: Path) -> None:
    if version("transformers") != RECORD["transformers"]:
        pytest.skip("the record is of another release of transformers")
    found = compare(name, tmp_path / "model")
    assert (found.why is None) == RECORDED[name]["runs"], found.why


def test_the_record_names_every_family_of_its_release() -> None:
    if version("transformers") == RECORD["transformers"]:
        assert set(RECORDED) == set(FAMILIES)
    assert not NO_DECODERS & set(RECORDED)


def test_qwen2_moe_runs_in_the_own_decoder_and_its_windows_in_masks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare("qwen2_moe", tmp_path / "model", quick=True)
    assert (found.forward, found.why, found.kinds) == ("compiled", None, ("full",))
    extra = {"use_sliding_window": True, "max_window_layers": 4}
    monkeypatch.setitem(families._EXTRA, "qwen2_moe", extra)
    assert "in its mask alone" in (compare("qwen2_moe", tmp_path / "model").why or "")


def test_at_least_a_hundred_families_run() -> None:
    assert sum(entry["runs"] for entry in RECORDED.values()) >= 100
    for entry in RECORDED.values():
        assert entry["runs"] == (entry["why"] is None)
        if entry["runs"]:
            for dtype, bound in LOGITS_BOUND.items():
                ran = entry[dtype.value]
                assert set(ran["equal_tokens"].values()) == {ALL_EQUAL}
                assert ran["logits_error"] < bound
                assert ran["hit_tokens"]
                assert ran["preemptions"]


def test_the_package_serves_what_the_record_says() -> None:
    assert compared() == {name: entry["why"] for name, entry in RECORDED.items()}


@pytest.mark.parametrize(
    ("family", "layers"), [("axk1", "4 of 4"), ("kimi_linear", "2 of 4"), ("glm4_moe_lite", None)]
)
def test_a_plan_says_what_expanded_latents_cost(
    family: str, layers: str | None, tmp_path: Path
) -> None:
    families.build(family, tmp_path)
    warnings = plan_of(PlanRequest(str(tmp_path), DeviceFacts(DeviceKind.CPU))).warnings
    found = [line for line in warnings if "goes through transformers' modules" in line]
    assert bool(found) is bool(layers)
    assert RECORDED[family].get("expands_latents", False) is bool(layers)
    for line in found:
        assert f"in {layers} layers" in line
        assert "160 numbers per token, and not its latent of 24" in line


def test_the_page_is_the_record() -> None:
    from scripts.families import page

    assert (ROOT / "docs" / "models.md").read_text() == page(RECORD)


def test_readme_counts_the_families_of_the_record() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    run = re.search(r"^(\d+) of \d+ decoder families", page, re.M)
    own = re.search(r"own decoder, for (\d+) families", page)
    assert run
    assert own
    readme = (ROOT / "README.md").read_text()
    assert (
        f"{run[1]} decoder families of transformers, {own[1]} of them in Kvant's own decoder"
        in readme
    )
