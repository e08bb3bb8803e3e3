"""A directory as a whole: where declarations stand, multimodal configs, broken files, GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.facts import CheckpointKV, KVWish, UnreadableWish
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from tests.kv.checkpoint.build import (
    FP8_SCHEME,
    bf16,
    compressed_tensors,
    f32,
    followed,
    layer,
    modelopt_file,
    safetensors_bytes,
    scales,
    weight,
    write,
)
from tests.kv.checkpoint.stored import read_checkpoint

FP8 = KVDtype.FP8_E4M3
DECLARED = compressed_tensors(FP8_SCHEME)


def test_a_checkpoint_that_says_nothing_says_nothing(tmp_path: Path) -> None:
    read = read_checkpoint(write(tmp_path, tensors={}))
    assert read == CheckpointKV(checked=True)


def test_a_config_alone_is_enough_and_scales_are_unchecked(tmp_path: Path) -> None:
    read = read_checkpoint(write(tmp_path, DECLARED))
    assert isinstance(read.scheme, KVWish)
    assert not read.checked
    assert read.notes == ()


def test_a_config_already_read_is_not_read_again(tmp_path: Path) -> None:
    read = read_checkpoint(tmp_path, {"quantization_config": DECLARED})
    assert isinstance(read.scheme, KVWish)


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"text_config": {"quantization_config": DECLARED}}, "text_config.quantization_config"),
        ({"llm_config": {"quantization_config": DECLARED}}, "llm_config.quantization_config"),
        (
            {"thinker_config": {"text_config": {"quantization_config": DECLARED}}},
            "thinker_config.text_config.quantization_config",
        ),
        ({"compression_config": {"kv_cache_scheme": FP8_SCHEME}}, "compression_config"),
        (
            {"compression_config": {"quantization_config": {"kv_cache_scheme": FP8_SCHEME}}},
            "compression_config.quantization_config",
        ),
    ],
)
def test_declarations_are_found_where_multimodal_and_older_configs_keep_them(
    tmp_path: Path, config: dict[str, Any], where: str
) -> None:
    wish = followed(read_checkpoint(write(tmp_path, config=config)), layer(0))
    assert (wish.k, wish.v) == (FP8, FP8)
    assert wish.where == f"config.json: {where}.kv_cache_scheme"


def test_a_vision_part_is_not_asked(tmp_path: Path) -> None:
    read = read_checkpoint(
        write(tmp_path, config={"vision_config": {"quantization_config": DECLARED}})
    )
    assert read.scheme is None


@pytest.mark.case("A19")
def test_the_same_wish_in_two_dialects_agrees(tmp_path: Path) -> None:
    read = read_checkpoint(write(tmp_path, DECLARED, hf_quant=modelopt_file("FP8")))
    assert followed(read, layer(0)).where.startswith("config.json")


@pytest.mark.case("A19")
def test_top_and_text_config_that_disagree_are_unreadable(tmp_path: Path) -> None:
    inner = compressed_tensors({**FP8_SCHEME, "type": "int"})
    read = read_checkpoint(
        write(tmp_path, DECLARED, config={"text_config": {"quantization_config": inner}})
    )
    assert isinstance(read.scheme, UnreadableWish)
    assert "8-bit float per tensor" in read.scheme.why
    assert "8-bit int per tensor" in read.scheme.why


@pytest.mark.parametrize("declared", ["fp8", ["x"], 3])
def test_a_declaration_that_is_no_object_is_unreadable(tmp_path: Path, declared: Any) -> None:
    read = read_checkpoint(write(tmp_path, declared))
    assert isinstance(read.scheme, UnreadableWish)


# -- scales from the files -----------------------------------------------------------------------


def test_scales_carry_name_file_shape_and_dtype(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.k_scale": bf16(0.5, 0.5)}
    read = read_checkpoint(write(tmp_path, DECLARED, tensors=tensors))
    found = read.scales["model.layers.0.self_attn", Side.K]
    assert found.name == "model.layers.0.self_attn.k_scale"
    assert (found.file, found.shape, found.dtype) == ("model.safetensors", (2,), "BF16")
    assert (found.inverse, found.rivals) == (False, ())
    assert found.numel == 2


def test_scales_are_gathered_over_all_shards(tmp_path: Path) -> None:
    write(tmp_path, DECLARED)
    shards = {
        "a.safetensors": {"model.layers.0.self_attn.k_scale": f32(1.0)},
        "b.safetensors": {"model.layers.0.self_attn.v_scale": f32(2.0), "lm_head.weight": weight()},
    }
    index = {"weight_map": {name: file for file, content in shards.items() for name in content}}
    for file, content in shards.items():
        (tmp_path / file).write_bytes(safetensors_bytes(content))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read = read_checkpoint(tmp_path)
    assert {side: read.scales["model.layers.0.self_attn", side].file for side in Side} == {
        Side.K: "a.safetensors",
        Side.V: "b.safetensors",
    }


def test_an_index_without_its_files_leaves_scales_unchecked_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, DECLARED)
    index = {"weight_map": {"model.layers.0.self_attn.k_scale": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read = read_checkpoint(tmp_path)
    assert not read.checked
    (note,) = read.notes
    assert "model.safetensors.index.json" in note


def test_relatives_of_scales_are_kept_with_the_reason_they_are_not_used(tmp_path: Path) -> None:
    names = ("q_scale", "prob_output_scale", "k_zero_point", "k_cache_offset")
    read = read_checkpoint(
        write(tmp_path, DECLARED, tensors={**scales(num_layers=1), **scales(names, num_layers=1)})
    )
    assert len(read.scales) == 2
    assert [line.partition(": ")[0].rpartition(".")[2] for line in read.ignored] == list(names)
    assert "queries are not quantised" in read.ignored[0]


# -- broken files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe{}", b'{"a": 1, "a": 2}', b"[" * 100_000,
     b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"],
)  # fmt: skip
def test_broken_json_is_an_error_that_names_the_file(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (write(tmp_path, tensors={}) / name).write_bytes(content)
    with pytest.raises(BadCheckpoint) as refused:
        read_checkpoint(tmp_path)
    assert str(tmp_path / name) in refused.value.what


def test_a_directory_without_config_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_checkpoint(tmp_path)


def test_broken_weights_are_an_error_even_if_nothing_is_declared(tmp_path: Path) -> None:
    (write(tmp_path, tensors={}) / "model.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        read_checkpoint(tmp_path)
