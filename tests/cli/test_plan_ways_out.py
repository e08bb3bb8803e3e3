"""What a new user gets wrong in `kvant plan`, for models of several kinds: the ways out work as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvant.errors import ConfigError
from kvant.kv.dtype import KVDtype
from kvant.kv.memory import parse_size
from tests.cli.command import Ran, kvant
from tests.engine import tiny_chat
from tests.models import families
from tests.models.tiny_quantized import build_fp8

FAMILIES = ("qwen3", "gemma3", "gpt_oss", "qwen3_5", "deepseek_v3", "granitemoehybrid")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        families.build(name, directory / name)
    return {name: directory / name for name in FAMILIES}


def ways_out(ran: Ran) -> list[list[str]]:
    """The options that a refusal or a warning proposes."""
    found = re.findall(r"way out: (?:[^\n:;]*: )?(--[^\n;]*)", ran.out + ran.err)
    return [shlex.split(line.split(", a smaller")[0]) for line in found]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("asked", [["--memory", "1KiB"], ["--kv-cache-memory", "1KiB"]])
def test_too_little_memory_is_answered_with_enough(
    models: dict[str, Path], name: str, asked: list[str]
) -> None:
    path = str(models[name])
    refused = kvant("plan", path, *asked)
    assert "does not fit" in refused.out
    (way,) = ways_out(refused)
    assert way[0] == asked[0]
    less = [way[0], str(parse_size(way[1], asked_by="test") * 8 // 10)]
    assert "for a first page" in kvant("plan", path, *less).out
    assert "does not fit" not in kvant("plan", path, *way).out


def test_only_wide_weights_that_can_be_rounded_are_offered(
    models: dict[str, Path], tmp_path: Path
) -> None:
    path = str(models[FAMILIES[0]])
    little = ("--memory", "1KiB", "--dtype", "float32", "--device", "cpu")
    assert "--quantization" in kvant("plan", path, *little).out
    assert "(--quantization)" not in kvant("plan", path, *little, "--quantization", "int8").out
    stored, _ = build_fp8(tmp_path / "stored")
    assert "(--quantization)" not in kvant("plan", str(stored), *little).out
    families.build("gpt2", tmp_path / "transposed")
    refused = kvant("plan", str(tmp_path / "transposed"), *little).out
    assert "or a smaller model" in refused
    assert "(--quantization)" not in refused


def test_a_longer_sequence_than_fits_is_answered_with_one_that_does(
    models: dict[str, Path],
) -> None:
    asked = ("plan", str(models["qwen3"]), "--kv-cache-memory", "64KiB", "--max-model-len")
    refused = kvant(*asked, "512")
    (way,) = ways_out(refused)
    assert "does not fit" not in kvant(*asked[:-1], *way).out


def test_more_pages_than_the_device_holds_are_answered(models: dict[str, Path]) -> None:
    asked = ("plan", str(models["qwen3"]), "--memory", "2MiB")
    assert "way out: a smaller --kv-cache-memory" in kvant(*asked, "--kv-cache-memory", "3MiB").out
    assert "does not fit" not in kvant(*asked).out


def test_more_pages_than_this_machine_holds_are_no_plan_to_chat_with(
    models: dict[str, Path],
) -> None:
    asked = ("plan", str(models["qwen3"]), "--kv-cache-memory")
    refused = kvant(*asked, "900TiB").out
    assert "more than the device has; way out: a smaller --kv-cache-memory" in refused
    assert "serve it:" not in refused
    assert "serve it:" in kvant(*asked, "1MiB").out
    assert "does not fit" not in kvant(*asked, "900TiB", "--memory", "1000TiB").out


def test_only_a_model_with_a_tokenizer_is_one_to_chat_with(
    models: dict[str, Path], tmp_path: Path
) -> None:
    without = kvant("plan", str(models["qwen3"]), "--kv-cache-memory", "1MiB").out
    assert "it has no tokenizer: serve it for prompts of token ids" in without
    assert "chat with it" not in without
    model = tiny_chat.build(tmp_path)
    assert f"chat with it:  kvant chat {model}" in kvant("plan", str(model)).out


def test_a_pair_of_formats_on_latents_is_answered_with_single_ones(
    models: dict[str, Path],
) -> None:
    path = str(models["deepseek_v3"])
    for asked, single in (
        ("int4_feedback", KVDtype.FP8_PER_TOKEN_HEAD),
        ("fp8_e4m3/model", KVDtype.FP8_E4M3),
    ):
        refused = kvant("plan", path, "--kv-cache-dtype", asked)
        assert refused.code == 2
        (way,) = ways_out(refused)
        assert way[1] == str(single)
        assert "serve it:" in kvant("plan", path, *way).out


def test_an_override_beside_the_decoders_section_is_answered_with_its_place(
    models: dict[str, Path],
) -> None:
    path = str(models["gemma3"])
    for asked in ('{"rms_norm_eps": 1e-5}', '{"num_hidden_layers": 2}'):
        refused = kvant("plan", path, "--hf-overrides", asked)
        assert refused.code == 2
        (way,) = ways_out(refused)
        changed = kvant("plan", path, *way)
        assert "stands in text_config" not in changed.out + changed.err
        assert "text_config." in changed.out + changed.err


def test_a_drafters_json_without_quotes_is_answered_with_some(models: dict[str, Path]) -> None:
    path = str(models["qwen3"])
    refused = kvant("plan", path, "--speculative-config", "{method:ngram}")
    way = re.search(r"way out: .*: (\{.*\})", refused.err)
    assert way is not None
    assert "serve it:" in kvant("plan", path, "--speculative-config", way[1]).out


def test_what_transformers_does_not_read_is_said_in_its_last_line(models: dict[str, Path]) -> None:
    path = str(models["granitemoehybrid"])
    refused = kvant("plan", path, "--hf-overrides", '{"num_hidden_layers": 2}')
    assert refused.code == ConfigError.exit_code
    assert "must be equal to the number of `layer_types`" in refused.err
    assert "StrictDataclass" not in refused.err
