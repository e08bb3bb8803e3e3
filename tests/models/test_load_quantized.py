"""Checkpoints that are themselves quantised: their weights run, their KV wish is only a wish."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from kvant import LLM
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.attention.reference.backend import backend
from kvant.errors import BadCheckpoint, EngineFault, NotServable
from kvant.kv.codecs import codec_for
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.format import Side
from kvant.kv.names import parse_format
from kvant.kv.pool import KVPool
from kvant.kv.request import Asked, KVRequest, Requests
from kvant.kv.spec import KVPlan, ScaleState, Source
from kvant.models.geometry import weight_methods
from kvant.models.geometry.weight_methods import METHODS
from kvant.models.loaded import LoadedModel
from kvant.models.quantized import check_nothing_quantises_kv
from kvant.models.quiet import quiet_transformers
from kvant.plan.plan import PlanRequest
from tests.attention import driver
from tests.models import loading, tiny, tiny_narrow
from tests.models.tiny_quantized import (
    build_fp8,
    build_mxfp4,
    build_nvfp4,
    build_quantized,
    scale,
)
from tests.planned import plan_of

CPU = torch.device("cpu")
PROMPT = [3, 17, 5, 90, 41]


def plan_and_load(path: Path, wanted: str | None) -> tuple[KVPlan, LoadedModel]:
    """`kvant`'s own road: read the checkpoint, resolve, load. wanted None: nothing was asked."""
    asked = "--kv-cache-dtype " + (wanted or "auto")
    explicit = () if wanted is None else (Asked(parse_format(wanted, asked_by=asked), asked),)
    request = PlanRequest(
        str(path),
        DeviceFacts(DeviceKind.CPU),
        Requests(target=KVRequest(explicit=explicit)),
        dtype=ComputeDtype.FLOAT32,
    )
    planned = plan_of(request, weights=True).target
    return planned.kv, loading.load(path, planned.kv, planned.geometry)


def pool_of(model: LoadedModel) -> KVPool:
    return KVPool(model.plan, 4, scales=model.scales, device=CPU)


def generate(model: LoadedModel) -> list[int]:
    return driver.greedy(model, pool_of(model), backend(), [PROMPT], 12, chunk=100)[0]


@pytest.mark.case("F1")
def test_f1_an_explicit_bfloat16_is_not_overwritten_by_the_checkpoints_scheme(
    tmp_path: Path,
) -> None:
    path, _ = build_quantized(tmp_path)
    plan, model = plan_and_load(path, "bfloat16")
    for layer in plan.layers:
        for choice in (layer.k, layer.v):
            assert choice is not None
            assert (choice.dtype, choice.source) == (KVDtype.BFLOAT16, Source.EXPLICIT)
            assert choice.scale.state is ScaleState.UNUSED
    pool = pool_of(model)
    assert model.scales == {}
    texts = driver.Driver(pool, backend())
    ids, call, last = texts.call([(driver.Text(list(PROMPT)), len(PROMPT))])
    model.forward(ids, call, last)
    stored = pool[0].k[0].flatten(0, 1)[16 : 16 + len(PROMPT)]
    assert stored.dtype is torch.bfloat16
    assert (stored.view(torch.int16) & 0xF != 0).any(), "the low bits of e4m3 numbers are all zero"
    assert len(generate(model)) == 12


def test_a_quantised_checkpoint_runs_with_its_own_scales_for_auto(tmp_path: Path) -> None:
    path, _ = build_quantized(tmp_path)
    plan, model = plan_and_load(path, None)
    pool = pool_of(model)
    for layer in plan.layers:
        index = layer.geometry.index
        for side, choice, used in (
            (Side.K, layer.k, pool[index].k_scale),
            (Side.V, layer.v, pool[index].v_scale),
        ):
            assert choice is not None
            assert (choice.dtype, choice.source) == (KVDtype.FP8_E4M3, Source.CHECKPOINT)
            assert choice.scale.state is ScaleState.FOUND
            assert used is not None
            assert used.tolist() == pytest.approx([scale(index, side.value)])
    assert len(generate(model)) == 12


@pytest.mark.parametrize("wanted", [None, "bfloat16", "float32"])
def test_keys_and_values_are_quantised_once(wanted: str | None, tmp_path: Path) -> None:
    """What lies in the pages is the encoding of what the unquantised attention would have seen."""
    path, decoded = build_quantized(tmp_path)
    _, model = plan_and_load(path, wanted)
    pool = pool_of(model)
    ids, call, last = driver.Driver(pool, backend()).call([(driver.Text(list(PROMPT)), 5)])
    model.forward(ids, call, last)

    plain = LlamaForCausalLM(tiny.config_of("llama"))
    plain.load_state_dict(decoded)
    keys, values = first_layers_rows(plain, ids)
    cache = pool[0]
    for planes, choice, rows, used in (
        (cache.k, cache.spec.k, keys, cache.k_scale),
        (cache.v, cache.spec.v, values, cache.v_scale),
    ):
        assert choice is not None
        codec = codec_for(choice.dtype)
        found = codec.decode([p.flatten(0, 1)[16:21] for p in planes], used, rows.dtype)
        expected = codec.decode(codec.encode(rows, used), used, rows.dtype)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def first_layers_rows(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K after rotary and V of layer 0 from transformers' own cache: [T, heads, head_dim]."""
    with torch.no_grad():
        layer = model(ids[None], use_cache=True).past_key_values.layers[0]
    return layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)


def assert_logits_are_those_of(decoded: dict[str, torch.Tensor], path: Path) -> None:
    """Return logits of a checkpoint's codes, in float32, and of transformers with the decoded weights."""
    _, model = plan_and_load(path, "float32")
    ids, call, _ = driver.Driver(pool_of(model), backend()).call([(driver.Text(list(PROMPT)), 5)])
    found = model.forward(ids, call, torch.arange(5))
    plain = LlamaForCausalLM(tiny.config_of("llama"))
    plain.load_state_dict(decoded)
    with torch.no_grad():
        expected = plain(ids[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_logits_of_quantised_weights_are_those_of_the_decoded_weights(tmp_path: Path) -> None:
    path, decoded = build_quantized(tmp_path)
    assert_logits_are_those_of(decoded, path)


def test_weights_are_decoded_while_loading_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, _ = build_quantized(tmp_path)
    capfd.readouterr()
    _, model = plan_and_load(path, None)
    before = model.num_weight_bytes
    assert len(generate(model)) == 12
    assert model.num_weight_bytes == before
    assert {p.dtype for p in model._module.parameters()} == {torch.float32}
    assert capfd.readouterr() == ("", "")


def compressed(directory: Path) -> Path:
    return build_quantized(directory)[0]


def fp8(directory: Path) -> Path:
    return build_fp8(directory)[0]


@pytest.mark.parametrize("compute", [ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16])
@pytest.mark.parametrize("build", [compressed, fp8, build_mxfp4])
def test_weights_that_are_decoded_are_planned_as_what_they_are_then(
    build: Callable[[Path], Path], compute: ComputeDtype, tmp_path: Path
) -> None:
    path = build(tmp_path)
    request = PlanRequest(str(path), DeviceFacts(DeviceKind.CPU), dtype=compute)
    planned = plan_of(request, weights=True).target
    model = loading.load(path, planned.kv, planned.geometry)
    # Scales that are left, and buffers, are a few thousand bytes.
    assert planned.weights.bytes == pytest.approx(model.num_weight_bytes, abs=8000)


def test_fp8_weights_are_decoded_into_the_dtype_that_is_computed_in(tmp_path: Path) -> None:
    """transformers decodes them into bfloat16, which does not multiply with float32."""
    path, decoded = build_fp8(tmp_path)
    assert_logits_are_those_of(decoded, path)


def build_blocks(
    directory: Path, side: int, *, by_transformers: bool
) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with a scale for each block of side x side, that transformers or its library decodes."""
    path, decoded = build_fp8(directory)
    stored = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for old in [name for name in stored if name.endswith("_scale_inv")]:
        del stored[old]
        weight = old.removesuffix("_scale_inv")
        rows, columns = stored[weight].shape
        scales = torch.rand(-(-rows // side), -(-columns // side), generator=generator) + 0.5
        whole = scales.repeat_interleave(side, 0).repeat_interleave(side, 1)[:rows, :columns]
        decoded[weight] = stored[weight].float() * whole
        stored[f"{weight}_scale_inv" if by_transformers else f"{weight}_scale"] = scales
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    if by_transformers:
        config["quantization_config"]["weight_block_size"] = [side, side]
    else:
        weights = {
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [side, side],
        }
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "config_groups": {"all": {"targets": ["Linear"], "weights": weights}},
        }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path, decoded


@pytest.mark.parametrize(("side", "by_transformers"), [(16, True), (16, False), (24, False)])
def test_blocks_of_any_size_are_decoded(side: int, by_transformers: bool, tmp_path: Path) -> None:
    path, decoded = build_blocks(tmp_path, side, by_transformers=by_transformers)
    assert_logits_are_those_of(decoded, path)


def test_blocks_that_transformers_would_cut_elsewhere_are_refused(tmp_path: Path) -> None:
    """transformers takes 2 scales for 32 rows as blocks of 16 rows, also where blocks have 24."""
    path, _ = build_blocks(tmp_path, 24, by_transformers=True)
    request = PlanRequest(str(path), DeviceFacts(DeviceKind.CPU), dtype=ComputeDtype.FLOAT32)
    assert not plan_of(request, weights=True).can_run
    with pytest.raises(BadCheckpoint, match="has the shape") as refused:
        LLM(path, dtype="float32")
    assert "24 x 24 does not divide it" in (refused.value.why or "")


@pytest.mark.parametrize("dialect", ["ct fp8 channel", "ct int4"])
@pytest.mark.parametrize("layout", [None, "dense"])
def test_codes_in_a_layout_of_numbers_are_refused(
    dialect: str, layout: str | None, tmp_path: Path
) -> None:
    path, _ = tiny_narrow.build(tmp_path, dialect)
    config = json.loads((path / "config.json").read_text())
    declared = config["quantization_config"]
    for section in (declared, *declared["config_groups"].values()):
        section.pop("format", None)
    if layout is not None:
        declared["format"] = layout
    (path / "config.json").write_text(json.dumps(config))
    request = PlanRequest(str(path), DeviceFacts(DeviceKind.CPU), dtype=ComputeDtype.FLOAT32)
    assert not plan_of(request, weights=True).can_run
    with pytest.raises(BadCheckpoint, match="holds codes"):
        LLM(path, dtype="float32")


@pytest.mark.parametrize(
    "compute", [ComputeDtype.FLOAT32, ComputeDtype.FLOAT16, ComputeDtype.BFLOAT16]
)
def test_nvfp4_weights_are_decoded_into_the_dtype_that_is_computed_in(
    compute: ComputeDtype, tmp_path: Path
) -> None:
    """compressed-tensors decodes them into bfloat16, whose rounding is what the logits may differ by."""
    path, decoded = build_nvfp4(tmp_path)
    request = PlanRequest(str(path), DeviceFacts(DeviceKind.CPU), dtype=compute)
    planned = plan_of(request, weights=True).target
    model = loading.load(path, planned.kv, planned.geometry)
    weights = [p for name, p in model._module.named_parameters() if name.endswith(".weight")]
    assert {weight.dtype for weight in weights} == {getattr(torch, compute.value)}
    ids, call, _ = driver.Driver(pool_of(model), backend()).call([(driver.Text(list(PROMPT)), 5)])
    found = model.forward(ids, call, torch.arange(5))
    plain = LlamaForCausalLM(tiny.config_of("llama"))
    plain.load_state_dict(decoded)
    with torch.no_grad():
        expected = plain(ids[None]).logits[0]
    assert (found - expected).norm() < 0.03 * expected.norm()


QUANTISED = {
    "gptq": {"quant_method": "gptq", "bits": 3, "group_size": 128, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
    "bitsandbytes": {"load_in_4bit": True},
    "hqq": {"quant_method": "hqq"},
    "torchao": {"quant_method": "torchao"},
    "eetq": {"quant_method": "eetq"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    "sorcery": {"quant_method": "sorcery"},
}


@pytest.mark.parametrize("name", QUANTISED)
def test_weights_that_a_start_would_refuse_are_an_obstacle_of_the_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_methods, "_is_installed", lambda package: False)
    path = tiny.build("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**config, "quantization_config": QUANTISED[name]})
    )
    planned = plan_of(PlanRequest(str(path), DeviceFacts(DeviceKind.CPU)))
    assert not planned.can_run
    assert any("quantised by" in line for line in planned.obstacles)
    with pytest.raises(NotServable) as refused:
        LLM(path)
    assert refused.value is planned.target.refusal or refused.value.ways_out


@pytest.mark.parametrize("method", [m for m, needs in METHODS.items() if not needs.packages])
def test_methods_without_a_package_are_readers_of_transformers(method: str) -> None:
    assert method in AUTO_QUANTIZATION_CONFIG_MAPPING


def test_a_missing_compressed_tensors_package_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = build_quantized(tmp_path)
    monkeypatch.setattr(weight_methods, "_is_installed", lambda package: False)
    plan_and_load(path, None)  # Kvant decodes this format
    config = json.loads((path / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"] |= {"strategy": "group", "group_size": 32}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotServable, match="pip install compressed-tensors"):
        plan_and_load(path, None)


def test_a_checkpoint_of_which_only_the_kv_cache_is_quantised_has_plain_weights(
    tmp_path: Path,
) -> None:
    path, _ = build_quantized(tmp_path, weights=False)
    plan, model = plan_and_load(path, None)
    assert plan.layers[0].k is not None
    assert plan.layers[0].k.dtype is KVDtype.FP8_E4M3
    assert len(generate(model)) == 12


def test_transformers_own_fake_quantisation_of_kv_would_be_noticed(tmp_path: Path) -> None:
    """Loaded with its scheme, compressed-tensors does take hold of the attention layers."""
    path, _ = build_quantized(tmp_path)
    with quiet_transformers():
        model = LlamaForCausalLM.from_pretrained(path)
    with pytest.raises(EngineFault, match=r"model\.layers\.0\.self_attn"):
        check_nothing_quantises_kv(model)


@pytest.mark.parametrize("in_config", [True, False], ids=["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", "W4A8_AWQ", None])
def test_weights_quantised_by_modelopt_are_refused_and_not_read_as_numbers(
    algorithm: str | None, in_config: bool, tmp_path: Path
) -> None:
    path = tiny.build("llama", tmp_path)
    declared = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    if in_config:
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "modelopt", **declared}
        (path / "config.json").write_text(json.dumps(config))
    else:
        whole = {"producer": {"name": "modelopt"}, "quantization": declared}
        (path / "hf_quant_config.json").write_text(json.dumps(whole))
    geometry = tiny.geometry("llama")
    plan = driver.plan(geometry.layers)
    if algorithm is None:
        assert len(generate(loading.load(path, plan, geometry))) == 12
    elif algorithm != "W4A8_AWQ":  # Kvant decodes these: numbers are no codes
        with pytest.raises(BadCheckpoint, match=r"q_proj\.weight has the (dtype|shape)"):
            loading.load(path, plan, geometry)
    else:
        with pytest.raises(NotServable, match=f"ModelOpt as {algorithm}"):
            loading.load(path, plan, geometry)


def test_an_unknown_way_to_quantise_weights_is_refused(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "sorcery"}
    (path / "config.json").write_text(json.dumps(config))
    geometry = tiny.geometry("llama")
    with pytest.raises(NotServable, match="sorcery"):
        loading.load(path, driver.plan(geometry.layers), geometry)
