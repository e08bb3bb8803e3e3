"""Headers are believed only when they are whole; everything else is one kind of error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.safetensors_header import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    find_weight_files,
    read_header,
    read_headers,
)
from tests.kv.checkpoint.build import (
    Raw,
    bf16,
    f32,
    header_bytes,
    num_bytes,
    safetensors_bytes,
    weight,
)
from tests.kv.checkpoint.stored import stored


def write_file(directory: Path, data: bytes, name: str = "model.safetensors") -> Path:
    path = directory / name
    path.write_bytes(data)
    return path


def write_index(directory: Path, weight_map: Any, **metadata: Any) -> None:
    body = {"metadata": metadata, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(body))


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.zeros((0, 4), dtype=np.float16),
        "c": np.array(7, dtype=np.int64),
        "d": np.array([True, False, True]),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert set(header.tensors) == set(tensors)
    data = path.read_bytes()
    for name, array in tensors.items():
        entry = header.tensors[name]
        assert entry.shape == array.shape
        assert entry.num_bytes == array.nbytes
        assert data[entry.begin : entry.end] == array.tobytes()
    assert stored(tmp_path).by_dtype == {"F32": 24, "F16": 0, "I64": 8, "BOOL": 3}


TORCH_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2,
)  # fmt: skip


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_has_the_size_that_the_library_gives_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    path = tmp_path / "model.safetensors"
    stored = torch.zeros(3 * 5 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(3, 5)
    save_torch_file({"t": stored}, path)
    entry = read_header(path).tensors["t"]
    assert entry.num_bytes == 15 * dtype.itemsize
    other = path.read_bytes().replace(b'"shape":[3,', b'"shape":[4,')
    with pytest.raises(BadCheckpoint, match="cannot take"):
        read_header(write_file(tmp_path, other))


def test_6_bit_numbers_and_dtypes_of_the_future_are_measured_too(tmp_path: Path) -> None:
    tensors = {
        "e2m3": Raw("F6_E2M3", (4,), b"abc"),
        "e3m2": Raw("F6_E3M2", (2, 4), b"abcdef"),
        "new": Raw("Q5_NEXT", (9,), b"abcde"),
    }
    write_file(tmp_path, safetensors_bytes(tensors))
    assert stored(tmp_path).by_dtype == {"F6_E2M3": 3, "F6_E3M2": 6, "Q5_NEXT": 5}


def entry(**changes: Any) -> bytes:
    """A file with one sound tensor of 4 bytes, some field changed."""
    fields = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}
    return header_bytes({"t": fields}) + bytes(4)


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "shorter than a length": b"\x05\0\0",
    "no header": struct.pack("<Q", 0),
    "header longer than the file": struct.pack("<Q", 500) + b"{}",
    "absurd header length": struct.pack("<Q", 2**63 + 5) + b"{}",
    "header over the limit": struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
    "no json": header_bytes(b"{not json"),
    "no utf-8": header_bytes(b'{"\xff": 1}'),
    "a list": header_bytes([]),
    "deeply nested": header_bytes(b"[" * 200_000),
    "a name twice": header_bytes(
        b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    + bytes(4),
    "entry is no object": header_bytes({"t": 3}),
    "no dtype": entry(dtype=None),
    "no shape": entry(shape=None),
    "negative shape": entry(shape=[-1, -1]),
    "boolean shape": entry(shape=[True]),
    "float shape": entry(shape=[1.0]),
    "huge shape": entry(shape=[2**62] * 40),
    "offsets backwards": entry(data_offsets=[4, 0]),
    "one offset": entry(data_offsets=[4]),
    "negative offset": entry(data_offsets=[-4, 0]),
    "size against shape": entry(shape=[2]),
    "hole before": entry(data_offsets=[4, 8]) + bytes(4),
    "truncated": entry()[:-1],
    "trailing bytes": entry() + b"x",
    "overlap": header_bytes(
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
        }
    )
    + bytes(6),
}


def test_the_sound_file_that_the_broken_ones_come_from_is_read(tmp_path: Path) -> None:
    assert stored(write_file(tmp_path, entry()).parent).total == 4


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, data: bytes) -> None:
    path = write_file(tmp_path, data)
    with pytest.raises(BadCheckpoint) as refused:
        read_header(path)
    assert str(path) in refused.value.what
    assert refused.value.why


def test_an_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    with pytest.raises(BadCheckpoint, match="Git LFS pointer") as refused:
        read_header(write_file(tmp_path, pointer))
    assert "git lfs pull" in str(refused.value)


@given(
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=100).map(header_bytes),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["dtype", "shape", "data_offsets", "t", "__metadata__"]), inner
                )
            ),
            max_leaves=12,
        ).map(header_bytes),
    )
)
@example(header_bytes({"__metadata__": 3}))
def test_any_bytes_in_a_file_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = write_file(tmp_path_factory.getbasetemp(), data, "fuzz.safetensors")
    try:
        header = read_header(path)
    except BadCheckpoint:
        return
    total = sum(tensor.num_bytes for tensor in header.tensors.values())
    assert total == len(data) - 8 - int.from_bytes(data[:8], "little")


@given(st.data())
def test_one_changed_byte_never_lets_a_tensor_reach_outside_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sound = bytearray(safetensors_bytes({"k_scale": f32(1.0), "w": bf16(1.0, 2.0)}))
    at = data.draw(st.integers(0, len(sound) - 1))
    sound[at] = data.draw(st.integers(0, 255))
    path = write_file(tmp_path_factory.getbasetemp(), bytes(sound), "changed.safetensors")
    try:
        header = read_header(path)
    except BadCheckpoint:
        return
    for found in header.tensors.values():
        assert 8 <= found.begin <= found.end <= len(sound)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"none\.safetensors"):
        read_header(tmp_path / "none.safetensors")


# -- several files ------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_file(tmp_path, safetensors_bytes({"a": f32(1.0)}), "one.safetensors")
    write_file(tmp_path, safetensors_bytes({"b": weight(5)}), "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, total_size=14)
    return tmp_path


def test_all_files_of_an_index_are_read_and_no_others(sharded: Path) -> None:
    write_file(sharded, b"not a model at all", "consolidated.safetensors")
    headers = read_headers(sharded)
    assert headers is not None
    assert [header.path.name for header in headers] == ["one.safetensors", "two.safetensors"]
    assert stored(sharded).total == num_bytes(f32(1.0)) + num_bytes(weight(5))
    assert stored(sharded).by_dtype == {"F32": 4, "BF16": 10}


def test_a_whole_file_that_the_index_leaves_out_counts_alone(sharded: Path) -> None:
    write_file(sharded, safetensors_bytes({"c": f32(1.0)}))
    headers = read_headers(sharded)
    assert headers is not None
    assert [header.path.name for header in headers] == ["model.safetensors"], "as in transformers"
    write_index(sharded, {"a": "one.safetensors", "c": "model.safetensors"})
    headers = read_headers(sharded)
    assert headers is not None
    assert [header.path.name for header in headers] == ["model.safetensors", "one.safetensors"]


def test_a_missing_shard_is_an_error_that_names_it(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"two\.safetensors is missing"):
        read_headers(sharded)


def test_a_tensor_that_is_not_where_the_index_says_is_an_error(sharded: Path) -> None:
    write_index(sharded, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    with pytest.raises(BadCheckpoint, match=r"two\.safetensors lacks tensor 'c'"):
        read_headers(sharded)


def test_a_tensor_in_two_files_is_an_error_that_names_both(sharded: Path) -> None:
    write_file(sharded, safetensors_bytes({"a": f32(2.0), "b": weight(5)}), "two.safetensors")
    with pytest.raises(BadCheckpoint, match="'a' is in two files") as refused:
        read_headers(sharded)
    assert "one.safetensors" in refused.value.why
    assert "two.safetensors" in refused.value.why


def test_an_index_that_came_alone_still_tells_the_size(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "one.safetensors"}, total_size=141107412992.0)
    assert read_headers(tmp_path) is None
    assert stored(tmp_path).total == 141107412992


@pytest.mark.parametrize("total", ["many", None, -4, float("inf"), float("nan"), [1]])
def test_a_size_that_is_no_size_is_not_believed(tmp_path: Path, total: Any) -> None:
    write_index(tmp_path, {"a": "one.safetensors"}, total_size=total)
    assert stored(tmp_path).total is None


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "", 3, None, "a/../../x", "a\0"]
)
def test_an_index_cannot_point_out_of_its_directory(tmp_path: Path, shard: Any) -> None:
    write_index(tmp_path, {"a": shard})
    with pytest.raises(BadCheckpoint, match="'a'"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map_is_an_error(tmp_path: Path, weight_map: Any) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(BadCheckpoint, match="weight_map"):
        read_headers(tmp_path)


def test_without_an_index_the_usual_name_counts_alone(tmp_path: Path) -> None:
    write_file(tmp_path, safetensors_bytes({"a": f32(1.0)}))
    write_file(tmp_path, safetensors_bytes({"a": f32(1.0)}), "adapter.safetensors")
    assert stored(tmp_path).total == 4


def test_no_files_are_no_size(tmp_path: Path) -> None:
    assert stored(tmp_path).total is None
    assert stored(tmp_path / "nowhere").total is None
