"""Writes calibrated scales: a copy of the checkpoint in compressed-tensors' format.

    DIR/                                 the files of the source, linked where the disk can
      config.json                        with quantization_config.kv_cache_scheme
      model-kv-scales.safetensors        <attention module>.k_scale and .v_scale, float32
      model.safetensors.index.json       names the scales' file beside the weights'
      kvant-key-rounding.safetensors     <attention module>.k_feedback; see `kvant.kv.checkpoint.rounding`

A scale has shape [1] per tensor, [num_kv_heads, 1, 1] per head, as in compressed-tensors.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from kvant.errors import BadCheckpoint, BadValue, NotServable, WayOut
from kvant.kv.checkpoint.facts import CheckpointKV
from kvant.kv.checkpoint.rounding import FILE_NAME as ROUNDING_NAME
from kvant.kv.checkpoint.rounding import SUFFIX
from kvant.kv.checkpoint.safetensors_header import INDEX_NAME, find_weight_files, read_headers
from kvant.kv.geometry import ModelGeometry
from kvant.measure.calibration.scales import Candidate, Sharing
from kvant.models.geometry.weight_methods import (
    COMPRESSED_TENSORS,
    declared_quantization,
    method_of,
)

SCALES_NAME = "model-kv-scales.safetensors"
CONFIG_NAME = "config.json"
_SKIPPED = (CONFIG_NAME, INDEX_NAME, SCALES_NAME, ROUNDING_NAME, "kvant-import.json")


def check_writable(
    target: Path, config: Mapping[str, Any], checkpoint: CheckpointKV, source: Path
) -> None:
    """Raises ConfigError if the checkpoint could not be written. Called before anything is measured."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadValue(
            f"--save {target} is there already",
            why="a calibrated checkpoint gets a directory of its own",
            ways_out=(WayOut("name a new directory"),),
        )
    folder = target.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadValue(f"--save {target} cannot be written", why=f"{folder} is no writable folder")
    if checkpoint.scales:
        tensor = next(iter(checkpoint.scales.values()))
        raise BadCheckpoint(
            f"{source} has KV scales already",
            why=f"{tensor.name} is in {tensor.file}; two scales for one layer cannot be told apart",
            ways_out=(WayOut("calibrate the checkpoint without KV scales"),),
        )
    declared = declared_quantization(config)
    if declared is None or method_of(declared) in COMPRESSED_TENSORS:
        return
    raise NotServable(
        f"{source} has weights quantised by {method_of(declared) or 'no named method'}",
        why="its config.json has no place for a compressed-tensors kv_cache_scheme",
        ways_out=(WayOut("calibrate the model with plain or compressed-tensors weights"),),
    )


def scheme(sharing: Sharing) -> dict[str, Any]:
    """Returns the kv_cache_scheme of static fp8 scales, as compressed-tensors defines it."""
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": sharing.value,
        "dynamic": False,
    }


def config_with_scheme(config: Mapping[str, Any], sharing: Sharing) -> dict[str, Any]:
    """Returns config.json with the scheme; unquantised weights get a declaration without weight groups."""
    found = json.loads(json.dumps(config))
    for holder in (found, found.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder.get(key), dict):
                holder[key]["kv_cache_scheme"] = scheme(sharing)
                return dict(found)
    found["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme(sharing),
    }
    return dict(found)


def scale_tensors(geometry: ModelGeometry, winner: Candidate) -> dict[str, Tensor]:
    """Returns the scales by tensor name: float32 [1] or [num_kv_heads, 1, 1]."""
    names = {layer.index: layer.name for layer in geometry.layers}
    found = {}
    for (index, side), values in winner.scales.items():
        shape = (1,) if winner.sharing is Sharing.TENSOR else (len(values), 1, 1)
        found[f"{names[index]}.{side.value}_scale"] = values.reshape(shape).contiguous()
    return found


def write_checkpoint(
    source: Path,
    target: Path,
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    winner: Candidate,
    matrices: Mapping[int, Tensor],
) -> None:
    """Writes the calibrated checkpoint; an interruption leaves nothing at `target`.

    matrices: for rounding keys, by layer index; float32 [num_kv_heads, head_dim, head_dim].
    """
    partial = target.absolute().parent / f".{target.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source)
            if path.is_file() and str(name) not in _SKIPPED and not _is_hidden(name):
                _link(path.resolve(), partial / name)
        tensors = scale_tensors(geometry, winner)
        save_file(tensors, str(partial / SCALES_NAME), metadata={"format": "pt"})
        if matrices:
            names = {layer.index: layer.name for layer in geometry.layers}
            rounding = {f"{names[i]}{SUFFIX}": matrix for i, matrix in matrices.items()}
            save_file(rounding, str(partial / ROUNDING_NAME), metadata={"format": "pt"})
        (partial / INDEX_NAME).write_text(
            json.dumps(_index(source, tensors), indent=1) + "\n", encoding="utf-8"
        )
        body = config_with_scheme(config, winner.sharing)
        (partial / CONFIG_NAME).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        if target.is_dir():
            target.rmdir()  # empty, as checked
        partial.rename(target)
    except OSError as fault:
        raise BadValue(f"--save {target} cannot be written", why=fault.strerror or "") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _index(source: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    headers = read_headers(source) or ()
    shard_of = {
        name: header.path.relative_to(source).as_posix()
        for header in headers
        for name in header.tensors
    }
    shard_of |= dict.fromkeys(tensors, SCALES_NAME)
    total = find_weight_files(source).total_bytes
    if total is None:
        total = sum(e.num_bytes for header in headers for e in header.tensors.values())
    size = total + sum(t.numel() * t.element_size() for t in tensors.values())
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(shard_of.items()))}


def _is_hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(source, target)
