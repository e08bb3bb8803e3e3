"""`kvant calibrate` as a user runs it, and what loads its checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvant.cli.calibrate import print_results
from kvant.engine.llm import LLM
from kvant.errors import BadValue, ConfigError
from kvant.execution.runner import ModelRunner
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.names import parse_format
from kvant.kv.spec import ScaleState, ScaleTensor
from kvant.measure.calibration.calibrate import (
    UNCALIBRATED,
    Calibration,
    Calibrator,
    Compared,
    Lesson,
    divide_text,
)
from kvant.measure.calibration.scales import Candidate, Method, Sharing
from kvant.measure.calibration.write import check_writable
from kvant.measure.own_engine import plan_storing
from kvant.measure.quality.kept import Kept
from kvant.measure.quality.texts import read_text
from tests.cli.command import kvant
from tests.engine import tiny_chat
from tests.models import families


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.build(tmp_path_factory.mktemp("calibrate"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"{i}: the sea, the open sea, measured twice." for i in range(400)))
    return path


def calibrate(model: Path, text: Path, *more: object) -> tuple[int, str, str]:
    ran = kvant(
        "calibrate", model, "--text", text, "--dtype", "float32", "--device", "cpu", "--context", "256",
        "--tokens", "2048", *more,
    )  # fmt: skip
    return ran.code, ran.out, ran.err


def test_scales_are_written_where_compressed_tensors_has_them(
    model: Path, text: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "calibrated"
    code, out, err = calibrate(model, text, "--save", saved, "--format", "json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["schema"] == 1
    assert len(found["compared"]) == 9
    assert set(found["rounding"]) == {"int4_feedback", "int4_per_token_head"}
    least = min(
        (one["kld_mean"], name) for name, one in found["compared"].items() if name != "uncalibrated"
    )
    assert found["winner"] == least[1]

    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((saved / "config.json").read_text())
    declared = QuantizationConfig.model_validate(config["quantization_config"])
    assert declared.kv_cache_scheme.num_bits == 8
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    scales = load_file(saved / "model-kv-scales.safetensors")
    assert set(scales) == {n for n, f in index["weight_map"].items() if f.startswith("model-kv")}
    assert (saved / "model.safetensors").samefile(model / "model.safetensors")

    llm = LLM(saved, dtype="float32", kv_cache_memory="1MiB")
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    for spec in llm.plan.layers:
        assert spec.k is not None
        assert str(spec.k.dtype) == "fp8_e4m3"
        assert spec.k.scale.state is ScaleState.FOUND
        stored = scales[f"{spec.geometry.name}.v_scale"]
        assert stored.shape in ((1,), (spec.geometry.num_kv_heads, 1, 1))
        used = runner.model.scales[spec.geometry.index, Side.V]
        assert torch.equal(used, stored.flatten())
    assert len(llm.generate("the sea")[0].token_ids) > 0
    # Other plans over loaded weights take their own scales from the checkpoint.
    wide = LLM(saved, dtype="float32", kv_cache_memory="1MiB", kv_cache_dtype="model")
    inner = wide.engine.runner
    assert isinstance(inner, ModelRunner)
    assert not inner.model.scales
    plan = plan_storing(wide, parse_format("fp8", asked_by="test"))
    for index, side in ((0, Side.K), (1, Side.V)):
        again = inner.model.scales_for(plan)[index, side]
        assert torch.equal(again, runner.model.scales[index, side])
    fed = LLM(saved, dtype="float32", kv_cache_memory="1MiB", kv_cache_dtype="int4_feedback")
    matrices = load_file(saved / "kvant-key-rounding.safetensors")
    runner = fed.engine.runner
    assert isinstance(runner, ModelRunner)
    for spec in fed.plan.layers:
        cache = runner.pool[spec.geometry.index]
        assert cache.k_rounding is not None
        assert torch.equal(cache.k_rounding, matrices[f"{spec.geometry.name}.k_feedback"])
        assert cache.k_rounding.abs().max() > 0
    assert len(fed.generate("the sea")[0].token_ids) > 0


def test_a_text_too_short_says_how_much_is_needed(model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("the sea " * 20)
    llm = LLM(model, dtype="float32", kv_cache_memory="1MiB")
    with pytest.raises(BadValue, match="too short to calibrate on") as caught:
        divide_text(read_text(short, llm), llm, 256, 2048)
    assert "it has 160 tokens; 4096 are needed" in caught.value.why


def test_a_scale_of_zero_is_named(model: Path, text: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if "layers.1.self_attn.v_proj.weight" in name)
    weights[name] = torch.zeros_like(weights[name])
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(broken, dtype="float32", kv_cache_memory="1MiB", kv_cache_dtype="model")
    lesson = divide_text(read_text(text, llm), llm, 256, 2048)
    calibrator = Calibrator(llm, lesson, KVDtype.FP8_E4M3, Kept(tmp_path / "kept", {}))
    with pytest.raises(
        BadValue, match=r"the v_scale of layer 1 \(model.layers.1.self_attn\) comes out 0"
    ):
        calibrator.run(lambda *_: None)


def test_a_checkpoint_that_cannot_be_written_is_refused_before_anything_is_read(
    model: Path, tmp_path: Path
) -> None:
    scale = ScaleTensor("a.k_scale", "m.safetensors", (1,), "F32", "a", Side.K)
    has_scales = CheckpointKV(scales={("a", Side.K): scale})
    awq = {"quantization_config": {"quant_method": "awq"}}
    for target, config, checkpoint, said in (
        (model, {}, CheckpointKV(), "is there already"),
        (tmp_path / "no" / "where", {}, CheckpointKV(), "is no writable folder"),
        (tmp_path / "new", {}, has_scales, "has KV scales already"),
        (tmp_path / "new", awq, CheckpointKV(), "weights quantised by awq"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_writable(target, config, checkpoint, model)
        assert said in f"{caught.value.what} {caught.value.why}"


def test_a_model_that_keeps_latents_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    families.build("deepseek_v2", tmp_path)
    llm = LLM(tmp_path, dtype="float32", device="cpu", kv_cache_memory="1MiB", max_model_len=128)
    lesson = Lesson(torch.zeros(1, 64, dtype=torch.int64), torch.zeros(1, 64, dtype=torch.int64))
    with pytest.raises(BadValue, match=r"no layer of .* stores keys and values") as refused:
        Calibrator(llm, lesson, KVDtype.FP8_E4M3, Kept(tmp_path, {}))
    (way_out,) = refused.value.ways_out
    flag, fmt = way_out.arguments
    assert flag == "--kv-cache-dtype"
    LLM(tmp_path, dtype="float32", kv_cache_dtype=fmt, kv_cache_memory="1MiB", max_model_len=128)


@pytest.mark.parametrize("helps", [True, False])
def test_scales_that_do_not_help_are_reported(
    helps: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    winner = Candidate(Method.MSE, Sharing.HEAD, {})
    rows = [Compared(name, 0.01, 0.001, 0.1, 0.9) for name in (winner.name, UNCALIBRATED)]
    compared = tuple(rows if helps else reversed(rows))
    print_results(Calibration({}, winner, compared, {}, (), 2000), {"model": "m", "saved": "there"})
    told = capsys.readouterr().out
    assert ("needs no calibration" in told) is not helps
    assert f"{winner.name} is written to there" in told
