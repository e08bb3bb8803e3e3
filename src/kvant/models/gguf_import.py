"""Converts GGUF files once to a directory in transformers' format: float32 safetensors and JSON.

Dequantisation is the gguf package's. The result equals what transformers loads from the same file
(`from_pretrained(..., gguf_file=)`), bit by bit, but it is computed once instead of at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kvant.errors import BadCheckpoint
from kvant.models import gguf_config, gguf_header, import_cache
from kvant.models.gguf_config import ImportedConfig, TensorPlace
from kvant.models.gguf_header import GGUFHeader, GGUFTensor, malformed
from kvant.models.local import Progress
from kvant.weights.format import BLOCK_TYPES

# Part of every cache key: increase it whenever the conversion of an unchanged file changes.
CONVERTER_VERSION = 1

_NUMBERS = ("F64", "F32", "F16", "BF16")
_SHARD_BYTES = 1 << 30
_HASHED_WHOLE = 256 << 20
_OTHER_FILES_BYTES = 32 << 20  # upper bound for tokenizer and JSON files


@dataclass(frozen=True, slots=True)
class Attribution:
    """A model's attribution: its author, its licence, and the licence text if known.

    sampling: the author's sampling values for generation_config.json, if the file has none.
    """

    notice: str = ""
    license_text: str | None = None
    sampling: tuple[tuple[str, float], ...] = ()


def import_gguf(
    path: Path,
    *,
    weights: bool = True,
    blocks: bool = False,
    progress: Progress | None = None,
    attribution: Attribution | None = None,
) -> Path:
    """Converts the file `path` unless that was done before. Returns the directory in transformers' format.

    blocks: matrices of `BLOCK_TYPES` keep their bytes, as uint8 [rows, bytes of a row], with rows in
    transformers' order; config.json names each matrix's type under `gguf_types`. Only Kvant reads that.

    weights=False writes only what a plan needs (config.json, generation_config.json and an index
    with the exact bytes of the weights after import) and imports neither torch nor transformers.
    Raises BadCheckpoint for a file that is broken or that Kvant does not import, ConfigError when
    the cache directory cannot hold the result.
    """
    attribution = attribution or Attribution()
    directory = import_cache.imports_directory("gguf")
    name = f"{path.stem}-{_fingerprint(path)}"
    if attribution.sampling:
        name += "".join(f"-{key}-{value:g}" for key, value in attribution.sampling)
    if blocks:
        name += "-blocks"
    whole, plan_only = directory / name, directory / f"{name}.plan"
    if import_cache.is_complete(whole):
        return whole
    header = gguf_header.read_header(path)
    imported = gguf_config.read_config(header, _rope_freqs(header))
    generation = {**dict(attribution.sampling), **imported.generation}
    imported = replace(imported, generation=generation)
    if blocks:
        imported = _keeping_blocks(header, imported)
    if not weights:
        return _make_plan_only(plan_only, header, imported)
    _make_whole(whole, header, imported, progress, attribution)
    return whole


def _keeping_blocks(header: GGUFHeader, imported: ImportedConfig) -> ImportedConfig:
    """Returns an import that keeps `BLOCK_TYPES`. config.json names the type of every matrix in blocks."""
    places, types = dict(imported.places), {}
    for name, place in imported.places.items():
        tensor = header.tensors[name]
        if len(place.shape) != 2 or tensor.type.name in _NUMBERS:
            continue
        types[place.name.removesuffix(".weight")] = tensor.type.name
        kind = BLOCK_TYPES.get(tensor.type.name)
        if kind is not None:
            places[name] = replace(place, stored_bytes=tensor.nbytes)
    return replace(imported, places=places, config={**imported.config, "gguf_types": types})


def _make_plan_only(final: Path, header: GGUFHeader, imported: ImportedConfig) -> Path:
    if not import_cache.is_complete(final):
        with import_cache.making(final, needed_bytes=1 << 20) as directory:
            if directory is not None:
                _write_configs(directory, imported)
                shards = _shards(imported.places)
                _write_index(directory, imported, shards)
                import_cache.seal(directory, _facts(header, imported))
    return final


def _make_whole(
    final: Path,
    header: GGUFHeader,
    imported: ImportedConfig,
    progress: Progress | None,
    attribution: Attribution,
) -> None:
    needed = imported.weights_bytes + _OTHER_FILES_BYTES
    with import_cache.making(final, needed_bytes=needed) as directory:
        if directory is None:
            return
        # Imported here: a plan needs no tokenizer. First, because it is quick to fail.
        from kvant.models.gguf_tokenizer import tokenizer_files

        for file, content in tokenizer_files(header, imported.config).items():
            (directory / file).write_text(content, encoding="utf-8")
        _write_configs(directory, imported)
        _write_weights(directory, header, imported, progress)
        (directory / "NOTICE").write_text(_notice(header, attribution), encoding="utf-8")
        if attribution.license_text is not None:
            (directory / "LICENSE").write_text(attribution.license_text, encoding="utf-8")
        import_cache.seal(directory, _facts(header, imported))


def _fingerprint(path: Path) -> str:
    """Returns sixteen hexadecimal digits that change with the file's content and with the converter.

    Up to 256 MiB every byte is hashed. For larger files only header, size, time of change and 64 samples are,
    since a plan has three seconds. Raises BadCheckpoint for a file that cannot be read.
    """
    try:
        facts = path.stat()
        return _fingerprint_of(path.resolve(), facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise BadCheckpoint(f"cannot read {path}", why=str(error)) from error


@lru_cache(maxsize=8)  # a start calls this several times; a changed file has another time of change
def _fingerprint_of(path: Path, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256(f"kvant gguf import {CONVERTER_VERSION}\n".encode())
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= _HASHED_WHOLE:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        else:
            digest.update(mtime_ns.to_bytes(8, "little", signed=True))
            digest.update(file.read(gguf_header.read_header(path).header_bytes))
            for sample in range(64):
                file.seek(size * sample // 64)
                digest.update(file.read(1 << 16))
    return digest.hexdigest()[:16]


def _rope_freqs(header: GGUFHeader) -> tuple[float, ...] | None:
    tensor = header.tensors.get(gguf_config.ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.type is not GGMLQuantizationType.F32 or tensor.nbytes > 1 << 16:
        raise malformed(header.path, f"tensor {tensor.name!r} is no short list of float32")
    with header.path.open("rb") as file:
        file.seek(tensor.start)
        return tuple(np.frombuffer(file.read(tensor.nbytes), dtype="<f4").tolist())


def _write_configs(directory: Path, imported: ImportedConfig) -> None:
    _write_json(directory / "config.json", imported.config)
    _write_json(directory / "generation_config.json", imported.generation)


def _shards(places: Mapping[str, TensorPlace]) -> dict[str, list[str]]:
    """Returns the GGUF tensor names of each weight file: one file, or several of about 1 GiB (the memory that
    a conversion needs)."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, place in places.items():
        if groups[-1] and filled + place.nbytes > _SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += place.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_index(directory: Path, imported: ImportedConfig, shards: dict[str, list[str]]) -> None:
    weight_map = {
        imported.places[name].name: file for file, names in shards.items() for name in names
    }
    index = {"metadata": {"total_size": imported.weights_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_weights(
    directory: Path, header: GGUFHeader, imported: ImportedConfig, progress: Progress | None
) -> None:
    from safetensors.numpy import save_file

    shards = _shards(imported.places)
    if len(shards) > 1:
        _write_index(directory, imported, shards)
    done = 0
    for file, names in shards.items():
        tensors: dict[str, npt.NDArray[Any]] = {}
        for place, values in _converted(header, imported.places, names):
            tensors[place.name] = values
            done += values.nbytes
            if progress is not None:
                progress(f"Converting {header.path.name}", done, imported.weights_bytes)
        save_file(tensors, directory / file, metadata={"format": "pt"})
        with (directory / file).open("rb+") as written:
            os.fsync(written.fileno())  # before the rename that publishes it


def _converted(
    header: GGUFHeader, places: Mapping[str, TensorPlace], names: list[str]
) -> Iterator[tuple[TensorPlace, npt.NDArray[Any]]]:
    """Yields the named tensors and their places: float32 [*shape], or blocks uint8 [rows, row bytes]."""
    data = np.memmap(header.path, mode="r", dtype=np.uint8)
    for name in names:
        tensor, place = header.tensors[name], places[name]
        if place.stored_bytes is None:
            values: npt.NDArray[Any] = _dequantized(header, data, tensor)
        else:
            values = _blocks(header, data, tensor)
        if place.rotary_heads:
            values = _rotary_halves(values, place.rotary_heads)
        yield place, np.ascontiguousarray(values)


def _dequantized(
    header: GGUFHeader, data: npt.NDArray[np.uint8], tensor: GGUFTensor
) -> npt.NDArray[np.float32]:
    """Decodes a tensor to float32 [*shape]. Raises BadCheckpoint for an unknown type and for NaN or Inf."""
    raw = data[tensor.start : tensor.start + tensor.nbytes]
    rows = raw.reshape(*tensor.shape[:-1], -1)
    try:
        with np.errstate(all="ignore"):  # the result is checked for NaN and Inf
            values = dequantize(rows, tensor.type).astype(np.float32, copy=False)
    except NotImplementedError:
        raise malformed(
            header.path,
            f"tensor {tensor.name!r} has type {tensor.type.name}, which holds no weights",
        ) from None
    if not np.isfinite(values).all():
        raise malformed(header.path, f"tensor {tensor.name!r} holds NaN or infinite numbers")
    return values.reshape(tensor.shape)


def _blocks(
    header: GGUFHeader, data: npt.NDArray[np.uint8], tensor: GGUFTensor
) -> npt.NDArray[np.uint8]:
    """Returns a matrix's blocks [rows, bytes of a row]. Raises BadCheckpoint for NaN or Inf in scales."""
    # Imported here: a plan needs no torch.
    import torch

    from kvant.weights.blocks import check_blocks

    raw = np.array(data[tensor.start : tensor.start + tensor.nbytes])
    rows = raw.reshape(tensor.shape[0], -1)
    try:
        check_blocks(
            f"tensor {tensor.name!r}", BLOCK_TYPES[tensor.type.name], torch.from_numpy(rows)
        )
    except BadCheckpoint as fault:
        raise malformed(header.path, f"{fault.what}: {fault.why}") from None
    return rows


def _rotary_halves(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorders rows of Q or K from llama.cpp's order to transformers'. Rows may be blocks' bytes.

    values: [num_heads * head_dim, hidden]. Within a head llama.cpp has the rows (0, h, 1, h+1, ..) with
    h = head_dim / 2, so the two rows that are rotated together are neighbours. In transformers they are
    h apart.
    """
    rows, hidden = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def _facts(header: GGUFHeader, imported: ImportedConfig) -> dict[str, object]:
    general = {
        key: value
        for key, value in header.metadata.items()
        if key.startswith("general.") and isinstance(value, str)
    }
    return {
        "converter": CONVERTER_VERSION,
        "source": str(header.path.resolve()),
        "source_metadata": general,
        "weights_bytes": imported.weights_bytes,
    }


def _notice(header: GGUFHeader, attribution: Attribution) -> str:
    def said(key: str) -> str:
        value = header.metadata.get(f"general.{key}")
        return value if isinstance(value, str) else "not stated in the file"

    return (
        f"{attribution.notice}"
        f"Converted by Kvant from {header.path.name}.\n"
        f"The file names itself: {said('name')}\n"
        f"Organisation: {said('organization')}\n"
        f"Licence: {said('license')}\n"
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
