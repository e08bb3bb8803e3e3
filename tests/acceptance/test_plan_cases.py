"""Acceptance cases that planning alone decides, each by its id, through `kvant plan` itself."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from kvant.errors import BadCheckpoint, BadValue, ConfigError, NotServable, UnknownName
from tests.acceptance.models import (
    DEEPSEEK,
    DFLASH,
    GEMMA3,
    GPT_OSS,
    HYBRID,
    PHI3,
    cache_warnings,
    compressed_tensors,
    config,
    modelopt,
    scales,
    write_model,
)
from tests.acceptance.plan_driver import formats, plan, scale_states, sources

BF16, FP8 = "bfloat16", "fp8_e4m3"
bf16 = ("--dtype", "bfloat16")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_model(tmp_path / "plain", config())


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """A compressed-tensors checkpoint with calibrated fp8 scales."""
    body = config(quantization_config=compressed_tensors())
    return write_model(tmp_path / "fp8", body, tensors=scales())


def nvfp4_modelopt(tmp_path: Path) -> Path:
    files = {"hf_quant_config.json": modelopt("NVFP4")}
    return write_model(
        tmp_path / "nvfp4", config(), files=files, tensors={"model.norm.weight": (1.0,)}
    )


# -- explicit against checkpoint ----------------------------------------------------------------


@pytest.mark.case("A01", "F1")
def test_explicit_bfloat16_beats_the_checkpoint(fp8: Path) -> None:
    body = plan(fp8, *bf16, "--kv-cache-dtype", "bfloat16")
    assert formats(body, "k") == formats(body, "v") == [BF16] * 4
    assert set(sources(body)) == {"explicit"}
    assert scale_states(body) == ["unused"] * 4
    assert any(FP8 in line for line in body["target"]["layers"][0]["k"]["considered"])


@pytest.mark.case("A01", "F1")
def test_nothing_can_write_to_a_plan(fp8: Path) -> None:
    from kvant.cli.plan import device_from
    from kvant.plan.plan import PlanRequest
    from tests.planned import plan_of

    made = plan_of(PlanRequest(str(fp8), device_from("cpu")))
    layer = made.target.kv.layers[0]
    assert layer.k is not None
    for thing, field in ((made.target.kv, "layers"), (layer, "k"), (layer.k, "dtype")):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, field, None)


@pytest.mark.case("A02")
@pytest.mark.parametrize("asked", [(), ("--kv-cache-dtype", "auto")])
def test_unset_and_auto_follow_the_checkpoint_with_its_scales(
    fp8: Path, asked: tuple[str, ...]
) -> None:
    body = plan(fp8, *asked)
    assert formats(body, "k") == formats(body, "v") == [FP8] * 4
    side = body["target"]["layers"][2]["v"]
    assert side["source"] == "checkpoint"
    assert "config.json" in side["because"]
    assert "kv_cache_scheme" in side["because"]
    assert side["scale"]["state"] == "found"
    assert side["scale"]["tensor"] == "model.layers.2.self_attn.v_scale"
    assert cache_warnings(body) == []


@pytest.mark.case("A03")
def test_explicit_fp8_uses_the_checkpoints_scales(fp8: Path) -> None:
    body = plan(fp8, "--kv-cache-dtype", "fp8")
    assert formats(body) == [FP8] * 4
    assert set(sources(body)) == {"explicit"}
    assert scale_states(body) == ["found"] * 4


@pytest.mark.case("A04")
def test_model_means_the_model_dtype_against_any_checkpoint(fp8: Path) -> None:
    body = plan(fp8, *bf16, "--kv-cache-dtype", "model")
    assert formats(body) == [BF16] * 4
    assert set(sources(body)) == {"explicit"}


@pytest.mark.case("A05", "F2")
def test_bfloat16_on_a_bfloat16_model_is_what_auto_stores(plain: Path) -> None:
    explicit, unset = plan(plain, *bf16, "--kv-cache-dtype", "bfloat16"), plan(plain, *bf16)
    assert formats(explicit) == formats(unset) == [BF16] * 4
    assert explicit["fingerprint"] == unset["fingerprint"]


@pytest.mark.case("A06", "F4")
@pytest.mark.parametrize(
    ("name", "stored"),
    [("float16", "float16"), ("half", "float16"), ("fp16", "float16"), ("float32", "float32"),
     ("float", "float32"), ("fp32", "float32"), ("bfloat16", BF16), ("bf16", BF16),
     ("fp8", FP8), ("fp8_e4m3", FP8), ("FP8", FP8)],
)  # fmt: skip
def test_aliases_become_one_name(plain: Path, name: str, stored: str) -> None:
    body = plan(plain, *bf16, "--kv-cache-dtype", name)
    assert formats(body) == formats(body, "v") == [stored] * 4


@pytest.mark.case("A08")
def test_unset_is_the_model_dtype_and_never_called_auto(plain: Path) -> None:
    body = plan(plain, *bf16)
    assert formats(body) == [BF16] * 4
    assert set(sources(body)) == {"model"}
    for layer in body["target"]["layers"]:
        assert "auto" not in (layer["k"]["format"], layer["v"]["format"], body["dtype"])


@pytest.mark.case("A09")
def test_fp8_without_scales_is_uncalibrated_and_says_so(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", config(), tensors={"model.norm.weight": (1.0,)})
    body = plan(model, "--kv-cache-dtype", "fp8")
    assert scale_states(body) == ["uncalibrated"] * 4
    (warning,) = cache_warnings(body)
    assert "fp8_per_token_head" in warning
    assert "calibrated" in warning
    assert cache_warnings(plan(model, "--kv-cache-dtype", "fp8_per_token_head")) == []


# -- ModelOpt, compressed-tensors ---------------------------------------------------------------


@pytest.mark.case("A10")
def test_modelopt_fp8_without_scales_is_its_cast_recipe(tmp_path: Path) -> None:
    files = {"hf_quant_config.json": modelopt("FP8")}
    model = write_model(
        tmp_path / "m", config(), files=files, tensors={"model.norm.weight": (1.0,)}
    )
    body = plan(model)
    assert formats(body) == [FP8] * 4
    assert scale_states(body) == ["cast"] * 4
    assert cache_warnings(body) == []


@pytest.mark.case("A12")
def test_explicit_fp8_beats_an_nvfp4_checkpoint(tmp_path: Path) -> None:
    body = plan(nvfp4_modelopt(tmp_path), "--kv-cache-dtype", "fp8")
    assert formats(body) == formats(body, "v") == [FP8] * 4


@pytest.mark.case("A13")
@pytest.mark.parametrize("algo", ["INT8", "NVFP4_AFFINE", "SOMETHING_NEW"])
def test_a_wish_without_a_format_is_an_error_with_a_way_out(tmp_path: Path, algo: str) -> None:
    files = {"hf_quant_config.json": modelopt(algo)}
    model = write_model(tmp_path / "m", config(), files=files)
    with pytest.raises(BadCheckpoint) as refused:
        plan(model)
    assert algo in str(refused.value)
    for name, stored in follow_ways_out(model, refused.value).items():
        assert stored == [BF16 if name == "model" else name] * 4


@pytest.mark.case("A14", "A15", "A16")
def test_per_layer_maps_are_followed_overridden_and_skipped(tmp_path: Path) -> None:
    layer_map = {
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
        "model.layers.1.self_attn": {"quant_algo": "NVFP4"},
    }
    body = modelopt(
        "MIXED_PRECISION", kv_cache_quantized_layers=layer_map, kv_cache_schema_version=1
    )
    model = write_model(
        tmp_path / "m", config(), files={"hf_quant_config.json": body},
        tensors={"model.norm.weight": (1.0,)},
    )  # fmt: skip
    assert formats(plan(model, *bf16)) == [FP8, "nvfp4", BF16, BF16]
    assert formats(plan(model, *bf16, "--kv-cache-dtype", "fp8")) == [FP8] * 4
    skipped = plan(model, *bf16, "--kv-cache-dtype-skip-layers", "0")
    assert formats(skipped) == [BF16, "nvfp4", BF16, BF16]
    assert sources(skipped)[0] == "skip"


@pytest.mark.case("A17")
@pytest.mark.parametrize(
    "scheme",
    [{"type": "int"}, {"num_bits": 4, "type": "int"}, {"num_bits": 4, "type": "float"},
     {"symmetric": False}, {"strategy": "token", "dynamic": True}],
)  # fmt: skip
def test_other_schemes_are_never_coerced_to_fp8(tmp_path: Path, scheme: dict[str, object]) -> None:
    model = write_model(tmp_path / "m", config(quantization_config=compressed_tensors(**scheme)))
    with pytest.raises(BadCheckpoint) as refused:
        plan(model)
    for name, stored in follow_ways_out(model, refused.value).items():
        assert stored == [BF16 if name == "model" else name] * 4


@pytest.mark.case("A17")
def test_a_block_scheme_we_have_is_honoured(tmp_path: Path) -> None:
    scheme = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    body = config(quantization_config=compressed_tensors(**scheme))
    model = write_model(
        tmp_path / "m", body, tensors=scales(names=("k_global_scale", "v_global_scale"))
    )
    assert formats(plan(model)) == ["nvfp4"] * 4


@pytest.mark.case("A18")
def test_one_scale_per_head_is_kept_as_such(tmp_path: Path) -> None:
    body = config(quantization_config=compressed_tensors(strategy="attn_head"))
    per_head = write_model(tmp_path / "heads", body, tensors=scales(numel=2))
    assert scale_states(plan(per_head)) == ["found"] * 4
    wrong = write_model(tmp_path / "wrong", body, tensors=scales(numel=3))
    with pytest.raises(BadCheckpoint, match=r"layers\.0\.self_attn\.k_scale"):
        plan(wrong)


@pytest.mark.case("A19")
def test_two_files_that_disagree_are_reported_and_overruled(tmp_path: Path) -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": "NVFP4"}
    model = write_model(
        tmp_path / "m", config(quantization_config=scheme),
        files={"hf_quant_config.json": modelopt("FP8")},
    )  # fmt: skip
    with pytest.raises(BadCheckpoint, match="disagree"):
        plan(model)
    assert formats(plan(model, "--kv-cache-dtype", "fp8")) == [FP8] * 4


# -- skips and rules ------------------------------------------------------------------------------


@pytest.mark.case("A20", "F3")
def test_skipping_windows_leaves_every_layer_its_own_spec(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", GEMMA3)
    body = plan(
        model, *bf16, "--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "sliding_window"
    )
    assert formats(body) == formats(body, "v") == [BF16] * 5 + [FP8]
    assert sources(body) == ["skip"] * 5 + ["explicit"]
    layers = body["target"]["layers"]
    assert [layer["bytes_per_token"] for layer in layers] == [2 * 2 * 256 * 2] * 5 + [2 * 2 * 256]
    assert body["target"]["bytes_per_token"] == sum(layer["bytes_per_token"] for layer in layers)


@pytest.mark.case("A21")
def test_skipped_layers_beside_nvfp4_keep_their_own_widths(plain: Path) -> None:
    body = plan(plain, *bf16, "--kv-cache-dtype", "nvfp4", "--kv-cache-dtype-skip-layers", "0,-1")
    assert formats(body) == [BF16, "nvfp4", "nvfp4", BF16]
    widths = [layer["bytes_per_token"] for layer in body["target"]["layers"]]
    assert widths == [512, 2 * 2 * (32 + 4), 2 * 2 * (32 + 4), 512]


@pytest.mark.case("A22")
def test_skips_apply_to_the_checkpoints_wishes_too(fp8: Path) -> None:
    body = plan(fp8, *bf16, "--kv-cache-dtype-skip-layers", "0,1")
    assert formats(body) == [BF16, BF16, FP8, FP8]
    assert scale_states(body) == ["unused", "unused", "found", "found"]


@pytest.mark.case("A23")
@pytest.mark.parametrize("layers", ["4", "-5", "re:nothing_like_it", "sliding_window", "7-9"])
@pytest.mark.parametrize("flag", ["--kv-cache-dtype-skip-layers", "--kv-cache-rule"])
def test_selecting_nothing_is_an_error_that_lists_the_layers(
    plain: Path, flag: str, layers: str
) -> None:
    value = layers if flag.endswith("skip-layers") else f"{layers}:fp8"
    with pytest.raises(BadValue) as refused:
        plan(plain, flag, value)
    assert layers in str(refused.value)
    assert "full: 0-3" in str(refused.value)
    assert "model.layers.0.self_attn" in str(refused.value)


@pytest.mark.case("A24")
def test_hybrids_count_every_layer_and_store_only_attention(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", HYBRID)
    body = plan(model, *bf16, "--kv-cache-rule", "3:fp8")
    assert formats(body) == [None, None, None, FP8]
    assert [layer["attention"] for layer in body["target"]["layers"]] == ["none"] * 3 + ["full"]
    with pytest.raises(BadValue, match="keeps no KV"):
        plan(model, "--kv-cache-rule", "2:fp8")


@pytest.mark.case("A26")
def test_a_policy_file_decides_layer_by_layer_and_side_by_side(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", config(num_hidden_layers=8))
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "rules:\n"
        "  - 0-3: bf16\n"
        "  - 4-: fp8\n"
        "  - {layers: 're:layers\\.6\\.', k: nvfp4}\n"
        "  - {layers: 5, k: int8_per_token_head, v: int4_per_token_head}\n"
        "  - -1: model\n"
    )
    body = plan(model, "--dtype", "float32", "--kv-cache-policy", str(policy))
    assert formats(body, "k") == [BF16] * 4 + [FP8, "int8_per_token_head", FP8, "float32"]
    assert formats(body, "v") == [BF16] * 4 + [FP8, "int4_per_token_head", FP8, "float32"]


@pytest.mark.case("A26")
def test_equally_close_rules_that_disagree_are_an_error(plain: Path) -> None:
    with pytest.raises(BadValue, match="equally close"):
        plan(plain, "--kv-cache-rule", "0-1:fp8", "--kv-cache-rule", "1-2:bf16")
    body = plan(plain, *bf16, "--kv-cache-rule", "0-3:fp8", "--kv-cache-rule", "1-2:bf16")
    assert formats(body) == [FP8, BF16, BF16, FP8]


@pytest.mark.case("A26")
def test_a_pattern_yields_to_an_index_and_beats_a_kind(plain: Path) -> None:
    rules = ("full:fp8", r"re:layers\.[12]\.:bf16", "2:nvfp4")
    body = plan(plain, *(word for rule in rules for word in ("--kv-cache-rule", rule)))
    assert formats(body) == [FP8, BF16, "nvfp4", FP8]


# -- geometry -------------------------------------------------------------------------------------


@pytest.mark.case("A27")
def test_a_pair_on_one_latent_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", DEEPSEEK)
    with pytest.raises(BadValue, match="one latent") as refused:
        plan(model, "--kv-cache-dtype", "fp8/int4_per_token_head")
    (way,) = refused.value.ways_out
    assert formats(plan(model, *way.arguments)) == [FP8] * 3


@pytest.mark.case("A28")
def test_an_unknown_name_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(UnknownName) as refused:
        plan("no/such-model", "--kv-cache-dtype", "fp8_e4m4")
    message = str(refused.value)
    assert "did you mean fp8_e4m3" in message
    for name in ("auto", "model", "nvfp4", "int4_per_token_head"):
        assert name in message


@pytest.mark.case("A29", "A42")
def test_a_format_no_backend_serves_is_refused_with_every_reason(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", DEEPSEEK)
    with pytest.raises(NotServable) as refused:
        plan(model, "--kv-cache-dtype", "int4_per_token_head")
    assert "reference" in str(refused.value)
    assert follow_ways_out(model, refused.value)["model"] == [BF16] * 3


@pytest.mark.case("A37")
def test_layers_that_share_kv_own_nothing_and_point_to_the_owner(tmp_path: Path) -> None:
    body = config(
        architectures=["Gemma3nForCausalLM"],
        model_type="gemma3n_text",
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        vocab_size_per_layer_input=1000,
        hidden_size_per_layer_input=16,
        altup_num_inputs=4,
        laurel_rank=8,
    )
    model = write_model(tmp_path / "m", body)
    made = plan(model, "--kv-cache-dtype", "fp8")
    shared = [layer for layer in made["target"]["layers"] if layer["attention"] == "shared"]
    assert [layer["layer"] for layer in shared] == [4, 5]
    assert all(layer["k"] is None and layer["bytes_per_token"] == 0 for layer in shared)
    assert [layer["shared_with"] for layer in shared] == [3, 2]
    with pytest.raises(BadValue, match="reads layer 2's"):
        plan(model, "--kv-cache-rule", "5:fp8")


@pytest.mark.case("A38", "A39")
@pytest.mark.parametrize(
    "name", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4"]
)
def test_two_head_sizes_and_windows_need_no_common_page_size(tmp_path: Path, name: str) -> None:
    body = config(
        architectures=["Gemma4ForCausalLM"],
        model_type="gemma4_text",
        num_hidden_layers=6,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        num_kv_shared_layers=0,
    )
    made = plan(write_model(tmp_path / "m", body), "--kv-cache-dtype", name)
    layers = made["target"]["layers"]
    assert [layer["head_dim_k"] for layer in layers] == [256] * 5 + [512]
    assert [layer["window"] for layer in layers] == [512] * 5 + [None]
    assert formats(made) == [name] * 6


@pytest.mark.case("A40")
def test_unequal_k_and_v_sizes_are_counted_side_by_side(tmp_path: Path) -> None:
    body = config(
        architectures=["MiMoV2FlashForCausalLM"],
        model_type="mimo_v2_flash",
        head_dim=192,
        v_head_dim=128,
        num_hidden_layers=4,
        hybrid_layer_pattern=[0, 1, 1, 0],
        sliding_window=128,
        swa_head_dim=192,
        swa_v_head_dim=128,
        swa_num_key_value_heads=4,
        swa_num_attention_heads=8,
    )
    made = plan(write_model(tmp_path / "m", body), "--kv-cache-dtype", "int8_per_token_head")
    layer = made["target"]["layers"][0]
    assert (layer["head_dim_k"], layer["head_dim_v"]) == (192, 128)
    assert layer["bytes_per_token"] == 2 * (192 + 4 + 128 + 4)


@pytest.mark.case("A41")
def test_a_latent_is_one_side_with_one_scale(tmp_path: Path) -> None:
    body = plan(write_model(tmp_path / "m", DEEPSEEK), "--kv-cache-dtype", "fp8")
    layer = body["target"]["layers"][0]
    assert layer["attention"] == "mla"
    assert layer["v"] is None
    assert layer["bytes_per_token"] == 512 + 64
    assert body["target"]["bytes_per_token_16bit"] == 3 * 2 * (512 + 64)


@pytest.mark.case("A43")
def test_quantised_keys_under_sinks_are_warned_about(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", GPT_OSS)
    warned = plan(model, "--kv-cache-dtype", "int8_per_token_head")["warnings"]
    assert any("sinks" in line for line in warned)
    wide_keys = plan(model, "--kv-cache-dtype", "bf16/int8_per_token_head")["warnings"]
    assert not any("sinks" in line for line in wide_keys)


@pytest.mark.case("A44")
def test_a_head_size_of_96_is_rotated_block_by_block(tmp_path: Path) -> None:
    body = plan(write_model(tmp_path / "m", PHI3), "--kv-cache-dtype", "int4_per_token_head")
    assert body["target"]["layers"][0]["bytes_per_token"] == 2 * 8 * (48 + 4)


@pytest.mark.case("A45")
def test_nvfp4_refuses_head_sizes_that_are_no_multiple_of_16(tmp_path: Path) -> None:
    body = config(hidden_size=576, num_attention_heads=8, head_dim=72)
    model = write_model(tmp_path / "m", body)
    with pytest.raises(NotServable, match="divisible by 16") as refused:
        plan(model, "--kv-cache-dtype", "nvfp4")
    for way in refused.value.ways_out:
        assert formats(plan(model, *_replacing(("--kv-cache-dtype", "nvfp4"), way.arguments)))


SM_90 = ("--device", "sm_90", "--kv-format-defaults", "off")


@pytest.mark.case("A45")
@pytest.mark.parametrize(
    "asked",
    [
        ("--kv-cache-dtype", "turboquant_k3"),
        ("--page-size", "7"),
        ("--attention-backend", "flashinfer", "--kv-cache-dtype", "int4_per_token_head"),
        ("--attention-backend", "cpu"),
        ("--kv-cache-rule", "0:turboquant_k3"),
        ("--kv-cache-rule", "0-2:k=turboquant_k3", "--kv-cache-dtype", "fp8"),
    ],
    ids=" ".join,
)
def test_every_way_out_of_a_format_without_a_backend_is_a_plan(
    tmp_path: Path, asked: tuple[str, ...]
) -> None:
    body = config(hidden_size=640, num_attention_heads=8, head_dim=80)
    model = write_model(tmp_path / "m", body)
    with pytest.raises(NotServable) as refused:
        plan(model, *SM_90, *asked)
    assert refused.value.ways_out
    for way in refused.value.ways_out:
        if way.arguments:
            kept = [
                a for a in zip(asked[::2], asked[1::2], strict=True) if a[0] != way.arguments[0]
            ]
            words = [word for pair in kept for word in pair]
            assert formats(plan(model, *SM_90, *words, *way.arguments))
        else:
            assert "in the rule for this layer" in way.text
            rule, name = asked[1], way.text.split()[1]
            changed = (rule.replace("turboquant_k3", name), *asked[2:])
            assert formats(plan(model, *SM_90, "--kv-cache-rule", *changed))


# -- drafter ----------------------------------------------------------------------------------------


def with_draft(tmp_path: Path, **changes: object) -> tuple[str, str]:
    """Arguments that add a drafter directory."""
    import json

    directory = write_model(tmp_path / "draft", config(DFLASH))
    body = {"method": "dflash", "model": str(directory), **changes}
    return ("--speculative-config", json.dumps(body))


@pytest.mark.case("A30", "A31", "F5")
def test_the_draft_inherits_only_an_explicit_global_format(fp8: Path, tmp_path: Path) -> None:
    unset = plan(fp8, *bf16, *with_draft(tmp_path))
    assert formats(unset) == [FP8] * 4
    assert formats(unset, part="draft") == [BF16] * 2
    explicit = plan(fp8, *bf16, *with_draft(tmp_path), "--kv-cache-dtype", "fp8")
    assert formats(explicit, part="draft") == [FP8] * 2
    assert all(not layer["causal"] for layer in explicit["draft"]["layers"])
    assert all(layer["backend"] for layer in explicit["draft"]["layers"])


@pytest.mark.case("A30", "A32")
def test_the_drafts_own_explicit_format_comes_first(plain: Path, tmp_path: Path) -> None:
    body = plan(plain, *bf16, *with_draft(tmp_path, kv_cache_dtype="fp8"))
    assert formats(body) == [BF16] * 4
    assert formats(body, part="draft") == [FP8] * 2


@pytest.mark.case("A33")
def test_capacity_is_counted_after_the_drafts_true_bytes(plain: Path, tmp_path: Path) -> None:
    memory = ("--memory", "64MiB", *bf16, "--kv-cache-dtype", "fp8")
    alone = plan(plain, *memory)
    both = plan(plain, *memory, *with_draft(tmp_path, kv_cache_dtype="bfloat16"))
    target, draft = both["target"]["bytes_per_token"], both["draft"]["bytes_per_token"]
    assert draft == 2 * 2 * 2 * 64 * 2
    pages = both["memory"]["kv_bytes"] // (16 * target)
    assert both["memory"]["capacity_tokens"] == (pages - 1) * 16
    assert both["memory"]["capacity_tokens"] < alone["memory"]["capacity_tokens"]
    used = sum(
        both["memory"][part]
        for part in ("weights_bytes", "reserve_bytes", "draft_bytes", "kv_bytes")
    )
    assert 0 <= both["memory"]["total_bytes"] - used < 16 * (target + draft)


@pytest.mark.case("A34", "A35")
def test_schemes_of_target_and_draft_do_not_cross(fp8: Path, plain: Path, tmp_path: Path) -> None:
    import json

    draft = write_model(
        tmp_path / "draft-fp8", config(DFLASH, quantization_config=compressed_tensors()),
        tensors={f"layers.{i}.self_attn.{s}_scale": (0.5,) for i in range(2) for s in "kv"},
    )  # fmt: skip
    flag = ("--speculative-config", json.dumps({"method": "dflash", "model": str(draft)}))
    own = plan(plain, *bf16, *flag)
    assert formats(own) == [BF16] * 4
    assert formats(own, part="draft") == [FP8] * 2
    reverse = plan(fp8, *bf16, *with_draft(tmp_path))
    assert formats(reverse) == [FP8] * 4
    assert formats(reverse, part="draft") == [BF16] * 2


@pytest.mark.case("F5")
def test_rules_and_skips_speak_of_the_target_unless_prefixed(plain: Path, tmp_path: Path) -> None:
    body = plan(
        plain, *bf16, *with_draft(tmp_path), "--kv-cache-dtype", "fp8",
        "--kv-cache-dtype-skip-layers", "0", "--kv-cache-rule", "draft:1:int8_per_token_head",
    )  # fmt: skip
    assert formats(body) == [BF16, FP8, FP8, FP8]
    assert formats(body, part="draft") == [FP8, "int8_per_token_head"]


# -- devices, sources, reports ------------------------------------------------------------------------


@pytest.mark.case("A54")
def test_gfx942_encodes_fp8_openly_as_fnuz(fp8: Path) -> None:
    body = plan(fp8, "--device", "gfx942", "--attention-backend", "reference")
    assert formats(body) == ["fp8_e4m3fnuz"] * 4
    assert "gfx942" in body["target"]["layers"][0]["k"]["because"]
    assert body["fingerprint"] != plan(fp8)["fingerprint"]


@pytest.mark.case("A55")
def test_e5m2_is_stored_as_e5m2_or_refused(plain: Path) -> None:
    assert formats(plan(plain, "--kv-cache-dtype", "fp8_e5m2")) == ["fp8_e5m2"] * 4


@pytest.mark.case("A56")
def test_flag_beats_environment_beats_file_and_all_are_named(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("kv_cache_dtype: nvfp4\n")
    monkeypatch.setenv("KVANT_KV_CACHE_DTYPE", "int8_per_token_head")
    file = ("--kv-cache-policy", str(policy))
    body = plan(plain, *file, "--kv-cache-dtype", "fp8")
    assert formats(body) == [FP8] * 4
    considered = " ".join(body["target"]["layers"][0]["k"]["considered"])
    assert "KVANT_KV_CACHE_DTYPE int8_per_token_head" in considered
    assert f"{policy}: kv_cache_dtype nvfp4" in considered
    assert formats(plan(plain, *file)) == ["int8_per_token_head"] * 4
    monkeypatch.delenv("KVANT_KV_CACHE_DTYPE")
    assert formats(plan(plain, *file)) == ["nvfp4"] * 4


@pytest.mark.case("A57", "A58")
def test_the_report_says_everything_and_its_numbers_add_up(fp8: Path) -> None:
    body = plan(
        fp8,
        *bf16,
        "--memory",
        "64MiB",
        "--kv-cache-dtype-skip-layers",
        "0",
        "--max-model-len",
        "1024",
    )
    target = body["target"]
    for layer in target["layers"]:
        for side in ("k", "v"):
            assert layer[side]["because"]
            assert layer[side]["considered"]
            assert layer[side]["scale"]["state"]
        assert layer["backend"]
    assert target["bytes_per_token"] == 512 + 3 * 256
    assert target["bytes_per_token_16bit"] == 4 * 512
    memory = body["memory"]
    assert memory["capacity_tokens"] * target["bytes_per_token"] <= memory["kv_bytes"]


# -- ways out -----------------------------------------------------------------------------------------


def follow_ways_out(model: Path, refused: ConfigError) -> dict[str, list[str | None]]:
    """Run every way out that carries arguments; formats of what it plans, by its last argument."""
    ways = [way.arguments for way in refused.ways_out if way.arguments]
    assert ways
    return {way[-1]: formats(plan(model, *bf16, *way)) for way in ways}


def _replacing(asked: tuple[str, ...], way: tuple[str, ...]) -> tuple[str, ...]:
    """The way out's arguments, in place of the same flag or beside the others."""
    return way if asked[0] == way[0] else (*asked, *way)
