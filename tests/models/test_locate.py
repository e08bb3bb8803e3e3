"""What a model's name means, and what the user hears when it means nothing that Kvant loads."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, BadValue, ConfigError, ModelNotFound
from kvant.models.directory import remote_code
from kvant.models.local import ModelSource
from kvant.models.locate import locate
from kvant.plan.plan import PlanRequest
from tests.models import tiny
from tests.models.tiny_gguf import write_gguf
from tests.planned import plan_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def safetensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


def directory(path: Path, *, weights: str | None = "model.safetensors", **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if weights is not None:
        (path / weights).write_bytes(safetensors())
    return path


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    found = locate(str(directory(tmp_path / "m")))
    assert (found.path, found.source) == (tmp_path / "m", ModelSource.DIRECTORY)
    assert (found.revision, found.notes, found.obstacles) == (None, (), ())


def test_a_directory_that_looks_like_a_hub_id_is_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen").mkdir()
    directory(tmp_path / "Qwen" / "Qwen3-8B")
    monkeypatch.chdir(tmp_path)
    assert locate("Qwen/Qwen3-8B").source is ModelSource.DIRECTORY


def test_a_config_alone_can_be_planned_and_not_loaded(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", weights=None)
    planned = locate(str(path), weights=False)
    assert planned.path == path
    assert "no .safetensors files" in planned.obstacles[0]
    with pytest.raises(BadCheckpoint, match=r"no \.safetensors files"):
        locate(str(path))


@pytest.mark.parametrize("as_directory", [False, True])
def test_a_gguf_file_is_found_by_its_name_or_its_directorys(
    tmp_path: Path, as_directory: bool
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    found = locate(str(tmp_path if as_directory else path))
    assert found.source is ModelSource.GGUF
    assert (found.path / "model.safetensors").is_file()


def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./nowhere", "nowhere"),
        ("/no/such/model", "/no/such/model"),
        ("nowhere.gguf", r"nowhere\.gguf"),
        ("smolm2", "did you mean smollm2"),
        ("gpt2", "owner/model"),
        ("", "no model ''"),
        ("a/b/c", "hub ids"),
        ("a" * 5000, "no model 'aaa"),
        ("~nobody_has_this_home/m", "home"),
        ("a\0b", "no model"),
    ],
)
def test_a_name_that_means_nothing_says_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=expected) as caught:
        locate(name)
    assert caught.value.exit_code == 2
    assert caught.value.ways_out


@pytest.mark.parametrize("name", ["smollm2", "{directory}"])
def test_a_revision_of_what_has_none_is_refused(tmp_path: Path, name: str) -> None:
    path = directory(tmp_path / "m")
    with pytest.raises(BadValue, match="only hub models have revisions"):
        locate(name.format(directory=path), revision="main")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pytorch_model.bin": b"x"}, r"Python pickles \(pytorch_model\.bin\)"),
        ({"model.pt": b"x"}, r"Python pickles \(model\.pt\)"),
        ({"consolidated.safetensors": b"x"}, r"consolidated\.safetensors, but neither"),
        ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, "Git LFS pointer"),
        ({"model.safetensors": safetensors()[:-1]}, "no whole safetensors file"),
        ({"model.safetensors": b"<html>404</html>"}, "no whole safetensors file"),
        ({"model.safetensors": b""}, "no whole safetensors file"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"w": "model-1.safetensors"}}'},
            r"model-1\.safetensors, which is not there",
        ),
        ({"model.safetensors.index.json": b'{"weight_map": {}}'}, "has no weight_map"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"w": "/etc/x.safetensors"}}'},
            "points",
        ),
        ({"model.safetensors.index.json": b"not json"}, r"index\.json"),
        (
            {
                "model-1.safetensors": safetensors(),
                "model.safetensors.index.json": b'{"weight_map": {"w": "model-1.safetensors"}}',
            },
            "has no metadata",
        ),
    ],
)
def test_weights_kvant_does_not_load_are_refused_and_planned_with_a_note(
    tmp_path: Path, files: dict[str, bytes], expected: str
) -> None:
    path = directory(tmp_path / "m", weights=None)
    for name, content in files.items():
        (path / name).write_bytes(content)
    with pytest.raises(BadCheckpoint, match=expected) as caught:
        locate(str(path))
    assert caught.value.exit_code == 2
    assert caught.value.ways_out
    assert caught.value.what in locate(str(path), weights=False).obstacles[0]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "it has no config.json"),
        ({"adapter_config.json": b"{}"}, "PEFT adapter"),
        ({"params.json": b"{}", "consolidated.00.pth": b"x"}, "its maker's own format"),
    ],
)
def test_a_directory_without_a_config_is_no_model(
    tmp_path: Path, files: dict[str, bytes], expected: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelNotFound, match=expected):
        locate(str(tmp_path), weights=False)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "[" * 100_000])
def test_a_config_that_is_no_json_object_names_the_file(tmp_path: Path, content: str) -> None:
    path = directory(tmp_path / "m")
    (path / "config.json").write_text(content)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        locate(str(path), weights=False)


def test_a_file_that_is_no_gguf_points_to_its_directory(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    with pytest.raises(ModelNotFound) as caught:
        locate(str(path / "model.safetensors"))
    assert str(path) in str(caught.value.ways_out[0])


PHI3 = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}


@pytest.mark.parametrize(
    ("model_type", "auto_map"),
    [
        ("llama", {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}),
        ("llama", {"AutoConfig": "configuration_x.LlamaConfig"}),
        ("phi3", PHI3 | {"AutoModelForCausalLM": "modeling_phi3.OtherForCausalLM"}),
        ("phi3", PHI3 | {"AutoTokenizer": "tokenization_x.XTokenizer"}),
        ("unheard_of", {"AutoModel": "x.Y"}),
        ("llama", "modeling.X"),
    ],
)
def test_remote_code_is_refused_and_planned_with_a_note(
    tmp_path: Path, model_type: str, auto_map: Any
) -> None:
    path = directory(tmp_path / "m", model_type=model_type, auto_map=auto_map)
    with pytest.raises(BadCheckpoint, match="its own Python code"):
        locate(str(path))
    assert "its own Python code" in locate(str(path), weights=False).obstacles[0]


def test_a_family_that_transformers_adopted_needs_no_remote_code(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", model_type="phi3", auto_map=PHI3)
    assert locate(str(path)).obstacles == ()


@pytest.mark.parametrize(
    ("model_type", "prefix"),
    [
        ("deepseek_v2", "DeepseekV2"),
        ("deepseek_v3", "DeepseekV3"),
        ("mimo_v2_flash", "MiMoV2Flash"),
        ("phi3", "Phi3"),
    ],
)
def test_the_adopted_families_are_transformers_own(model_type: str, prefix: str) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {
        "AutoConfig": f"configuration.{prefix}Config",
        "AutoModelForCausalLM": f"modeling.{prefix}ForCausalLM",
    }
    assert remote_code({"model_type": model_type, "auto_map": classes}, "m") is None
    assert type(AutoConfig.for_model(model_type)).__name__ == f"{prefix}Config"
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == f"{prefix}ForCausalLM"


@pytest.mark.slow
def test_the_way_out_of_pickled_weights_works(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    model: Any = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **small))  # type: ignore[arg-type]
    path = tmp_path / "m"
    model.config.save_pretrained(path)
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    with pytest.raises(ConfigError) as caught:
        locate(str(path))
    (way,) = caught.value.ways_out
    program = way.text.split('python -c "')[1].split('"')[0]
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    assert locate(str(tmp_path / "OUT")).obstacles == ()


def test_a_shipped_drafter_has_a_name() -> None:
    found = locate("smollm2-dflash")
    assert (found.path.name, found.source) == ("smollm2-dflash", ModelSource.SHIPPED)
    assert (found.path / "model.safetensors").is_file()
    with pytest.raises(ModelNotFound, match="did you mean smollm2-dflash"):
        locate("smollm2-dflsh")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no JSON object"),
        (b'{"version": "1.0", "added_tok', "is no JSON object"),
        (b"[]", "is no JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_tokenizer_that_is_cut_off_is_refused_and_planned_with_a_note(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    path = tiny.build("llama", tmp_path)
    (path / name).write_bytes(content)
    with pytest.raises(BadCheckpoint, match=says) as refused:
        locate(str(path), weights=True)
    assert name in refused.value.what
    assert refused.value.ways_out
    planned = plan_of(PlanRequest(str(path), DeviceFacts(DeviceKind.CPU)))
    assert not planned.can_run
    assert any(says in line and "way out" in line for line in planned.obstacles)


def test_a_quantization_config_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": "x"}))
    with pytest.raises(BadCheckpoint, match="quantization_config is 'x'") as refused:
        plan_of(PlanRequest(str(path), DeviceFacts(DeviceKind.CPU)))
    assert refused.value.ways_out
