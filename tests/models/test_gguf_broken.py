"""Broken, hostile and foreign GGUF files: refused by name, quickly, never half imported."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvant.errors import BadCheckpoint
from kvant.models.gguf_config import read_config
from kvant.models.gguf_header import read_header
from kvant.models.gguf_import import import_gguf
from kvant.models.gguf_tokenizer import tokenizer_files
from tests.models.tiny_gguf import HIDDEN, metadata, tensors, vocabulary, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(path: Path, cache: Path, expected: str) -> None:
    """The import of `path` fails, says `expected`, names the file, and leaves nothing behind."""
    with pytest.raises(BadCheckpoint, match=expected) as caught:
        import_gguf(path)
    assert path.name in str(caught.value)
    assert caught.value.exit_code == 2
    assert not [p for p in cache.rglob("*") if p.is_dir() and p.name != "gguf"]


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    return u64(len(value.encode())) + value.encode()


def start(tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(tensors) + u64(pairs)


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    dims = b"".join(u64(length) for length in shape)
    return text(name) + u32(len(shape)) + dims + u32(kind) + u64(offset)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the file is empty"),
        (b"GG", "begins with"),
        (b"PK\x03\x04" + bytes(64), "begins with"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
        (b"tjgg" + bytes(64), "old GGML format"),
        (b"GGUF", "incomplete download"),
        (start(version=1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
        (start(tensors=1 << 62), "incomplete download"),
        (start(pairs=1 << 62), "incomplete download"),
        (start(pairs=1) + u64(1 << 63) + bytes(64), "incomplete download"),
        (start(pairs=1) + text("k") + u32(99) + bytes(64), "unknown type 99"),
        (start(pairs=1) + text("k") + u32(8) + u64(1 << 60) + bytes(64), "incomplete download"),
        (start(pairs=1) + text("k") + u32(9) + u32(4) + u64(1 << 61) + bytes(64), "incomplete"),
        (start(pairs=1) + text("k") + u32(9) + u32(8) + u64(1 << 61) + bytes(64), "incomplete"),
        (start(pairs=1) + text("k") + u32(9) + u32(9) + u64(1) + bytes(64), "array of arrays"),
        (start(pairs=1) + u64(2) + b"\xff\xfe" + u32(0) + bytes(64), "no UTF-8"),
        (start(pairs=2) + (text("k") + u32(0) + b"\1") * 2 + bytes(64), "'k' is there twice"),
        (
            start(pairs=1) + text("general.alignment") + u32(4) + u32(24) + bytes(64),
            "no power of two",
        ),
        (
            start(pairs=1) + text("general.alignment") + u32(4) + u32(0) + bytes(64),
            "alignment is 0",
        ),
        (start(1) + tensor("t", [], 0, 0) + bytes(64), "0 dimensions"),
        (start(1) + tensor("t", [1] * 5, 0, 0) + bytes(64), "5 dimensions"),
        (start(1) + tensor("t", [0], 0, 0) + bytes(64), "absurd shape"),
        (start(1) + tensor("t", [1 << 40, 1 << 40], 0, 0) + bytes(64), "absurd shape"),
        (start(1) + tensor("t", [4], 999, 0) + bytes(64), "unknown type 999"),
        (start(1) + tensor("t", [33], 8, 0) + bytes(64), "blocks of 32"),
        (start(1) + tensor("t", [4096], 0, 0) + bytes(64), "'t' ends at byte"),
        (start(1) + tensor("t", [4], 0, 1 << 63) + bytes(64), "'t' ends at byte"),
        (start(2) + tensor("t", [4], 0, 0) * 2 + bytes(128), "'t' is listed twice"),
        (
            start(2) + tensor("a", [4], 0, 0) + tensor("b", [4], 0, 8) + bytes(128),
            "share the same bytes",
        ),
        (start() + bytes(64), "'general.architecture' is missing"),
        (
            start(pairs=1) + text("general.architecture") + u32(12) + struct.pack("<d", 1e300),
            "text",
        ),
    ],
)
def test_what_is_no_gguf_is_refused_at_once(
    tmp_path: Path, cache: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    began = time.monotonic()
    refused(path, cache, expected)
    assert time.monotonic() - began < 1


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, cache: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, len(whole) - 1, len(whole) // 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path, cache, "cut.gguf")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight.* missing"),
        ({"llama.block_count": 1}, r"no place for its tensors blk\.1\."),
        ({"llama.block_count": 0}, "block_count"),
        ({"llama.block_count": 4_000_000_000}, "block_count"),
        ({"llama.block_count": "2"}, "block_count"),
        ({"llama.feed_forward_length": 128}, "the metadata calls for"),
        ({"llama.embedding_length": 128}, "rotates 16 of 32"),
        ({"llama.attention.head_count_kv": 3}, "cannot share"),
        ({"llama.attention.head_count": [4, 4]}, "a list of 2"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon"),
        ({"llama.rope.freq_base": float("inf")}, "freq_base"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.attention.value_length": 32}, "heads of 16 numbers and V of 32"),
        ({"llama.attention.sliding_window": 64}, "settings Kvant does not know"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"llama.vocab_size": 5}, "tokens for a vocabulary of 5"),
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.model": None}, "does not name its vocabulary"),
        ({"tokenizer.ggml.model": "bert"}, "vocabulary kind 'bert'"),
        ({"tokenizer.ggml.pre": "superbpe"}, "'superbpe'"),
        ({"tokenizer.ggml.pre": None}, "None"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "no pair of tokens"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "vocabulary and merges disagree"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "2 token types"),
        ({"tokenizer.ggml.eos_token_id": 100_000}, "no token id below"),
        ({"tokenizer.ggml.add_bos_token": 1}, "not true or false"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, cache: Path, said: dict[str, object], expected: str
) -> None:
    changes = {key.replace(".", "__"): value for key, value in said.items()}
    refused(write_gguf(tmp_path / "t.gguf", metadata(**changes)), cache, expected)


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path, cache: Path) -> None:
    tokens = vocabulary()
    tokens[5] = tokens[6]
    path = write_gguf(tmp_path / "t.gguf", metadata(tokenizer__ggml__tokens=tokens))
    refused(path, cache, "is in the vocabulary twice")


@pytest.mark.parametrize("arch", ["mamba", "gemma3", "clip"])
def test_other_architectures_are_refused_by_name_with_a_hint(
    tmp_path: Path, cache: Path, arch: str
) -> None:
    path = write_gguf(tmp_path / "t.gguf", metadata(arch), arch=arch)
    refused(path, cache, f"architecture is '{arch}'.*\n.*original checkpoint")


def test_a_tensor_kvant_has_no_place_for_is_refused(tmp_path: Path, cache: Path) -> None:
    values = tensors() | {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
    refused(write_gguf(tmp_path / "t.gguf", values=values), cache, r"blk\.0\.attn_q\.bias")


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(
    tmp_path: Path, cache: Path, poison: float
) -> None:
    values = tensors()
    values["blk.1.ffn_norm.weight"][3] = poison
    refused(write_gguf(tmp_path / "t.gguf", values=values), cache, r"blk\.1\.ffn_norm.*NaN")


def test_an_infinite_block_scale_is_refused(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf")
    (stored,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[stored.data_offset : stored.data_offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    refused(path, cache, "ffn_up.*NaN or infinite")


@settings(
    max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_flipped_bytes_in_the_header_never_surprise(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "flipped.gguf"
    whole = write_gguf(path).read_bytes()
    length = read_header(path).header_bytes
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    refusal = refusal_of(path)
    assert refusal is None or "flipped.gguf" in str(refusal)


def refusal_of(path: Path) -> BadCheckpoint | None:
    try:
        header = read_header(path)
        config = read_config(header, None).config
        if header.metadata.get("tokenizer.ggml.model") == "gpt2":
            tokenizer_files(header, config)
    except BadCheckpoint as refusal:
        return refusal
    return None
