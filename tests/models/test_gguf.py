"""GGUF files become a directory that transformers loads, once, completely, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize
from safetensors.numpy import load_file

from kvant.errors import BadCheckpoint, ConfigError
from kvant.models import gguf_import, import_cache
from kvant.models.gguf_config import shortest_float32
from kvant.models.gguf_import import Attribution, import_gguf
from kvant.sampling.generation_defaults import recommended_params
from tests import forked
from tests.kv.checkpoint.stored import stored
from tests.models import tiny_gguf
from tests.models.tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, metadata, tensors, write_gguf

ROOT = Path(__file__).parents[2]
Floats = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def imported_weights(path: Path) -> dict[str, Floats]:
    return load_file(import_gguf(path) / "model.safetensors")


def in_files_order(values: Floats, num_heads: int) -> Floats:
    """Rows as llama.cpp stores them, from transformers' order, one row at a time."""
    rows = []
    for head in range(num_heads):
        for i in range(HEAD_DIM // 2):
            rows.append(values[head * HEAD_DIM + i])
            rows.append(values[head * HEAD_DIM + HEAD_DIM // 2 + i])
    return np.stack(rows)


# What is written


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_weights_are_the_gguf_packages_own_float32(tmp_path: Path, kind: str) -> None:
    values = tensors()
    name = "blk.1.ffn_up.weight"
    chosen = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "t.gguf", values=values, types={name: chosen})
    (stored,) = (t for t in gguf.GGUFReader(path).tensors if t.name == name)
    assert stored.tensor_type is chosen
    expected = dequantize(stored.data, stored.tensor_type)
    found = imported_weights(path)["model.layers.1.mlp.up_proj.weight"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_rows_of_q_and_k_are_put_back_into_transformers_order(tmp_path: Path) -> None:
    values = tensors()
    types = dict.fromkeys(values, gguf.GGMLQuantizationType.F32)
    found = imported_weights(write_gguf(tmp_path / "t.gguf", values=values, types=types))
    for letter, heads in (("q", HEADS), ("k", KV_HEADS)):
        loaded = found[f"model.layers.0.self_attn.{letter}_proj.weight"]
        np.testing.assert_array_equal(
            in_files_order(loaded, heads), values[f"blk.0.attn_{letter}.weight"]
        )
    np.testing.assert_array_equal(
        found["model.layers.0.self_attn.v_proj.weight"], values["blk.0.attn_v.weight"]
    )


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_equals_transformers_own_load(tmp_path: Path, arch: str, tied: bool) -> None:
    values = tensors(arch)
    if not tied:
        values["output.weight"] = values["token_embd.weight"][::-1].copy()
    path = write_gguf(tmp_path / "t.gguf", values=values, arch=arch)
    ours, theirs = loaded_by_transformers(import_gguf(path)), loaded_by_transformers(path)
    assert ours.config.model_type == theirs.config.model_type == arch
    for key in ("rope_parameters", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    assert_same_state(ours, theirs)


def loaded_by_transformers(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Bitwise, so that even the sign of a zero counts."""
    import torch

    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys()
    different = [k for k in a if not torch.equal(a[k].view(torch.int32), b[k].view(torch.int32))]
    assert not different


def test_the_config_is_what_the_file_says(tiny: Path) -> None:
    config = json.loads((import_gguf(tiny) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["rms_norm_eps"] == 1e-5  # not the 9.999999747378752e-06 that float32 makes of it
    assert config["head_dim"] == HEAD_DIM
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, 2),
        ({"tokenizer__ggml__eot_token_id": 0}, [2, 0]),
        ({"tokenizer__ggml__eot_token_id": 2}, 2),
        ({"tokenizer__ggml__eot_token_id": 0xFFFFFFFF}, 2),  # llama.cpp's null token
    ],
)
def test_every_token_that_ends_an_answer_is_an_eos_token_of_generation_config(
    tmp_path: Path, said: dict[str, object], expected: object
) -> None:
    path = write_gguf(tmp_path / "t.gguf", metadata(**said))
    generation = json.loads((import_gguf(path) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == expected
    assert generation["bos_token_id"] == 1


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    said = metadata(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    config = json.loads(
        (import_gguf(write_gguf(tmp_path / "t.gguf", said)) / "config.json").read_text()
    )
    assert config["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 10000.0,
        "factor": 4.0,
    }


def test_llama3_rope_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=HEAD_DIM, hidden_size=64, rope_parameters=dict(rope))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    values = tensors() | {"rope_freqs.weight": (plain / scaled).numpy()}
    path = write_gguf(tmp_path / "t.gguf", metadata(llama__rope__freq_base=500000.0), values)
    imported = import_gguf(path)
    assert json.loads((imported / "config.json").read_text())["rope_parameters"] == rope
    assert "rope_freqs.weight" not in load_file(imported / "model.safetensors")

    values["rope_freqs.weight"] = values["rope_freqs.weight"] * np.float32(1.01)
    other = write_gguf(tmp_path / "o.gguf", metadata(llama__rope__freq_base=500000.0), values)
    with pytest.raises(BadCheckpoint, match=r"not those of Llama 3\.1"):
        import_gguf(other)


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 1e6, 500000.0, 0.1, 1.25, 3.4e38])
def test_float32_metadata_reads_back_as_the_number_that_was_meant(value: float) -> None:
    assert shortest_float32(float(np.float32(value))) == value


def test_how_a_model_is_sampled_by_its_makers_is_kept_apart_and_yields_to_the_file(
    tiny: Path,
) -> None:
    plain = import_gguf(tiny)
    sampling = (("temperature", 0.25), ("eos_token_id", -1.0))
    sampled = import_gguf(tiny, attribution=Attribution(sampling=sampling))
    assert sampled != plain
    said, silent = (
        json.loads((path / "generation_config.json").read_text()) for path in (sampled, plain)
    )
    assert said == {"temperature": 0.25, **silent}
    assert recommended_params(sampled).temperature == 0.25
    assert recommended_params(plain).temperature == 1.0


def test_the_licence_and_the_makers_stay_with_the_model(tiny: Path) -> None:
    imported = import_gguf(tiny, attribution=Attribution("By A.\n", "licence text"))
    notice = (imported / "NOTICE").read_text()
    assert notice.startswith("By A.\n")
    assert "Licence: apache-2.0" in notice
    assert (imported / "LICENSE").read_text() == "licence text"


def test_large_models_become_shards_with_an_index(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_import, "_SHARD_BYTES", 100_000)
    imported = import_gguf(tiny)
    index = json.loads((imported / "model.safetensors.index.json").read_text())
    shards = sorted(imported.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(set(index["weight_map"].values())) == [shard.name for shard in shards]
    monkeypatch.undo()
    assert_same_state(loaded_by_transformers(imported), loaded_by_transformers(tiny))


# Tokenizers


def tokenizer_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(import_gguf(path))


def test_byte_level_text_survives_encoding_and_decoding(tiny: Path) -> None:
    tokenizer = tokenizer_of(tiny)
    for text in ("the man", "  12  ", "é 中 🙂", "a\n\tb", "<|im_start|>the<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_control_tokens_stay_whole_and_can_be_skipped(tiny: Path) -> None:
    tokenizer = tokenizer_of(tiny)
    ids = tokenizer("<|im_start|>x<|im_end|>")["input_ids"]
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_the_chat_template_comes_along(tiny: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer_of(tiny).apply_chat_template(messages, tokenize=False) == "hi"


@pytest.mark.parametrize(("pre", "said", "adds"), [
    ("gpt-2", None, False),
    ("gpt-2", True, True),
    ("llama-bpe", None, True),
    ("llama-bpe", False, False),
])  # fmt: skip
def test_bos_is_added_where_the_file_or_its_family_says_so(
    tmp_path: Path, pre: str, said: bool | None, adds: bool
) -> None:
    changes: dict[str, object] = {
        "tokenizer__ggml__pre": pre,
        "tokenizer__ggml__add_bos_token": said,
    }
    tokenizer = tokenizer_of(write_gguf(tmp_path / "t.gguf", metadata(**changes)))
    ids = tokenizer("x")["input_ids"]
    assert (ids[0] == 1, len(ids)) == (adds, 2 if adds else 1)


def test_the_splitter_of_the_file_is_used(tmp_path: Path) -> None:
    # "1 2" merges digits: GPT-2 and Llama 3 keep "12" in one piece, Qwen cuts digits apart.
    counts = {}
    for pre in ("gpt-2", "llama-bpe", "qwen2"):
        said = metadata(tokenizer__ggml__pre=pre)
        tokenizer = tokenizer_of(write_gguf(tmp_path / f"{pre}.gguf", said))
        counts[pre] = len(tokenizer("12", add_special_tokens=False)["input_ids"])
    assert counts == {"gpt-2": 1, "llama-bpe": 1, "qwen2": 2}


def test_sentencepiece_vocabularies_go_through_transformers(tmp_path: Path) -> None:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * 5]
    values = tensors()
    values["token_embd.weight"] = np.ones((len(tokens), tiny_gguf.HIDDEN), np.float32)
    said = metadata(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__pre=None,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__scores=[0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0],
        tokenizer__ggml__token_type=types,
        tokenizer__ggml__merges=None,
        tokenizer__ggml__unknown_token_id=0,
        tokenizer__ggml__add_bos_token=None,
    )
    tokenizer = tokenizer_of(write_gguf(tmp_path / "t.gguf", said, values))
    ids = tokenizer("ab é")["input_ids"]
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab é"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


# The cache


def test_a_second_import_finds_the_first(tiny: Path) -> None:
    first = import_gguf(tiny)
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert import_gguf(tiny) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before


def test_the_same_content_is_imported_once_wherever_and_whenever_it_lies(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    copy = tmp_path / "other" / "tiny.gguf"
    copy.write_bytes(tiny.read_bytes())
    os.utime(copy, (1, 1))
    assert import_gguf(copy) == import_gguf(tiny)


@pytest.mark.parametrize("whole_below", [1 << 30, 0])
def test_a_changed_file_is_imported_anew(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, whole_below: int
) -> None:
    monkeypatch.setattr(gguf_import, "_HASHED_WHOLE", whole_below)
    first = import_gguf(tiny)
    data = bytearray(tiny.read_bytes())
    data[-1] ^= 1  # the last weight
    tiny.write_bytes(data)
    os.utime(tiny, (1, 1))
    assert import_gguf(tiny) != first


def test_the_cache_is_for_this_user_alone(tiny: Path, cache: Path) -> None:
    imported = import_gguf(tiny)
    for directory in (cache, cache / "gguf", imported):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_a_damaged_import_is_made_again(tiny: Path) -> None:
    imported = import_gguf(tiny)
    weights = imported / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    assert import_gguf(tiny) == imported
    assert weights.read_bytes() == whole


def test_an_interrupted_import_leaves_nothing_that_looks_complete(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(task: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(tiny, progress=interrupt)
    assert [p for p in (cache / "gguf").iterdir() if p.is_dir()] == []


def test_what_a_killed_import_left_is_cleared_by_the_next(tiny: Path, cache: Path) -> None:
    program = (
        "import os, sys, pathlib; from kvant.models.gguf_import import import_gguf;"
        "import_gguf(pathlib.Path(sys.argv[1]), progress=lambda *_: os._exit(9))"
    )
    killed = forked.run(["-c", program, str(tiny)])
    assert killed.returncode == 9
    left = [p.name for p in (cache / "gguf").iterdir() if p.is_dir()]
    assert len(left) == 1
    assert left[0].endswith(".partial")
    imported = import_gguf(tiny)
    assert [p for p in (cache / "gguf").iterdir() if p.is_dir()] == [imported]
    assert import_cache.is_complete(imported)


def test_two_processes_at_once_make_one_import(tiny: Path, cache: Path) -> None:
    program = (
        "import sys, pathlib; from kvant.models.gguf_import import import_gguf;"
        "print(import_gguf(pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(tiny)]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(answers) == 1
    assert len([p for p in (cache / "gguf").iterdir() if p.is_dir()]) == 1


def test_too_little_disk_space_is_said_before_anything_is_written(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Full)
    with pytest.raises(ConfigError, match="not enough disk space") as caught:
        import_gguf(tiny)
    assert "KVANT_CACHE" in str(caught.value)
    assert [p for p in (cache / "gguf").iterdir() if p.is_dir()] == []


def test_a_cache_that_cannot_be_made_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANT_CACHE", str(tiny / "below-a-file"))
    with pytest.raises(ConfigError, match="cannot use the cache directory"):
        import_gguf(tiny)


def test_progress_rises_to_the_bytes_of_the_weights(tiny: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    imported = import_gguf(tiny, progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(set(done))
    assert {call[2] for call in calls} == {stored(imported).total}
    assert done[-1] == stored(imported).total


# Planning


def test_a_plan_gets_the_same_config_and_the_exact_bytes_without_weights(tiny: Path) -> None:
    plan = import_gguf(tiny, weights=False)
    assert list(plan.glob("*.safetensors")) == []
    whole = import_gguf(tiny)
    assert (plan / "config.json").read_text() == (whole / "config.json").read_text()
    assert stored(plan).total == stored(whole).total
    assert import_gguf(tiny, weights=False) == whole  # the better answer once it is there
