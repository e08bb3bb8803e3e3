"""Experts whose weights a checkpoint stores in a narrow format: their tensors, checked and read.

Kvant reads them itself, layer by layer: transformers would stack them as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.safetensors_header import TensorEntry
from kvant.models.fused.narrow_experts import NarrowExperts
from kvant.models.stored import Stored
from kvant.weights.codecs import NarrowStack, NarrowWeight, can_join, join
from kvant.weights.dialects import (
    check_order,
    check_part,
    check_scales,
    expert_parts,
    parts_of,
    read,
    read_experts,
)
from kvant.weights.format import Dialect, Scheme

_APART = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def read_tensor(file: Path, name: str, device: str = "cpu") -> Tensor:
    """One tensor [..] of a safetensors file."""
    with safe_open(file, "pt", device=device) as opened:
        found: Tensor = opened.get_tensor(name)
    return found


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Where the tensors of one layer's experts are. name: of their module. files: by a tensor's name."""

    name: str
    schemes: Mapping[str, Scheme]
    files: Mapping[str, Path]

    @staticmethod
    def find(
        name: str,
        module: NarrowExperts,
        stored: Stored,
        entries: Mapping[str, TensorEntry],
        home: Mapping[str, Path],
    ) -> StoredExperts:
        """Find and check the tensors that `module` needs, by the files' headers.

        BadCheckpoint, naming the tensor, for missing ones and for other shapes or dtypes.
        """
        schemes: dict[str, Scheme] = {}
        files: dict[str, Path] = {}
        for product, (count, rows, columns) in module.shapes.items():
            parts = _APART[product]
            scheme = stored.scheme(f"{name}.0.{parts[0]}")
            if scheme is None:
                raise BadCheckpoint(
                    f"{name}: some products of experts are narrow, others are not",
                    why=f"no format is declared for {product}",
                )
            refusal = scheme.format.refuse(rows // len(parts), columns)
            if refusal is not None:
                raise BadCheckpoint(f"{name}.{product} cannot be stored as declared", why=refusal)
            schemes[product] = scheme
            if scheme.dialect is Dialect.MXFP4_EXPERTS:
                wanted = {
                    f"{name}.{product}_{short}": part
                    for short, part in expert_parts(scheme, count, rows, columns).items()
                }
            else:
                wanted = {
                    f"{name}.{expert}.{one}.{short}": part
                    for expert in range(count)
                    for one in parts
                    for short, part in parts_of(scheme, rows // len(parts), columns).items()
                }
            for full, part in wanted.items():
                entry = entries.get(full)
                shape = None if entry is None else tuple(entry.shape)
                check_part(full, part, None if entry is None else entry.dtype, shape)
                if entry is not None:
                    files[full] = home[full]
        return StoredExperts(name, schemes, files)

    def read_into(self, module: NarrowExperts, device: torch.device) -> None:
        """Read all weights to the device. BadCheckpoint for scales and codes that are no numbers."""
        for product, (count, rows, columns) in module.shapes.items():
            scheme = self.schemes[product]
            if scheme.dialect is Dialect.MXFP4_EXPERTS:
                full = f"{self.name}.{product}"
                tensors = {
                    short: self._tensor(f"{full}_{short}", device) for short in ("blocks", "scales")
                }
                module.put(product, read_experts(full, scheme, count, rows, columns, tensors))
                continue
            parts = _APART[product]
            weights = [
                self._read_one(f"{self.name}.{expert}.{one}", scheme, rows // len(parts), columns, device)
                for expert in range(count)
                for one in parts
            ]  # fmt: skip
            if not can_join(weights):
                raise BadCheckpoint(
                    f"{self.name}.{product}: experts have scales of different dtypes",
                    why="their weights are read as one",
                )
            module.put(product, NarrowStack(join(weights), count))

    def _read_one(
        self, layer: str, scheme: Scheme, rows: int, columns: int, device: torch.device
    ) -> NarrowWeight:
        tensors: dict[str, Tensor] = {}
        for short, part in parts_of(scheme, rows, columns).items():
            full = f"{layer}.{short}"
            if full in self.files:
                tensors[short] = self._tensor(full, device)
                if part.is_scale:
                    check_scales(full, tensors[short])
                if short.endswith("g_idx"):
                    check_order(full, tensors[short], scheme.format.columns)
        return read(layer, scheme, rows, columns, tensors)

    def _tensor(self, name: str, device: torch.device) -> Tensor:
        return read_tensor(self.files[name], name, str(device))
