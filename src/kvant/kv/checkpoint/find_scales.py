"""Scale tensors among all tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvant.kv.checkpoint.facts import ScaleTensor, Side
from kvant.kv.checkpoint.safetensors_header import Header, TensorEntry
from kvant.kv.checkpoint.scale_names import WHY_IGNORED, ScaleName, ScaleRole, read_scale_name


@dataclass(frozen=True, slots=True)
class FoundScales:
    """scales: by attention module and side. ignored: "name: why not" of related tensors that are not used."""

    scales: Mapping[tuple[str, Side], ScaleTensor]
    ignored: tuple[str, ...]


def find_scales(headers: Iterable[Header], directory: Path) -> FoundScales:
    """Attach every scale to its attention module and side; files are named relative to `directory`.

    Two tensors for one place stay visible as rivals: Kvant does not guess which one counts. The
    one exception is a global scale beside block scales, which Kvant computes row by row itself.
    """
    found: dict[tuple[str, Side], dict[ScaleRole, list[ScaleTensor]]] = {}
    ignored: list[str] = []
    for header in headers:
        file = header.path.relative_to(directory).as_posix()
        for entry in header.tensors.values():
            name = read_scale_name(entry.name)
            if name is None:
                continue
            if name.role in WHY_IGNORED:
                ignored.append(f"{entry.name}: {WHY_IGNORED[name.role]}")
                continue
            for side in name.sides:
                roles = found.setdefault((name.module, side), {})
                roles.setdefault(name.role, []).append(_tensor(file, entry, name, side))
    scales: dict[tuple[str, Side], ScaleTensor] = {}
    for place, roles in found.items():
        main, *rest = roles.get(ScaleRole.GLOBAL_SCALE, []) + roles.get(ScaleRole.SCALE, [])
        rivals = [tensor for tensor in rest if tensor.inverse == main.inverse]
        ignored += [
            f"{tensor.name}: not used, block scales are computed row by row"
            for tensor in rest
            if tensor not in rivals
        ]
        scales[place] = replace(main, rivals=tuple(tensor.name for tensor in rivals))
    return FoundScales(scales, tuple(ignored))


def _tensor(file: str, entry: TensorEntry, name: ScaleName, side: Side) -> ScaleTensor:
    return ScaleTensor(
        name=entry.name,
        file=file,
        shape=entry.shape,
        dtype=entry.dtype,
        layer=name.module,
        side=side,
        inverse=name.role is ScaleRole.GLOBAL_SCALE,
    )
