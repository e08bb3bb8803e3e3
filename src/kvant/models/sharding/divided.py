"""A plan's view of tensor parallelism: what can be divided, what each rank holds, and refusals. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvant.errors import NotServable, WayOut
from kvant.kv.geometry import ModelGeometry
from kvant.models.geometry.parameters import Weight, WeightKind
from kvant.models.sharding.cuts import RULES, Cuts
from kvant.models.sharding.shard import Shard

_FLAG = "--tensor-parallel-size"
_SIZES = (8, 4, 2)


@dataclass(frozen=True, slots=True)
class Division:
    """How `size` ranks share a model.

    whole_bytes: weights of the undivided model, None if unknown. replicated: what every rank holds whole,
    in words.
    """

    size: int
    whole_bytes: int | None
    replicated: tuple[str, ...]


def check_division(
    config: Mapping[str, Any], geometry: ModelGeometry, size: int, *, quantized: str | None
) -> None:
    """Raise NotServable if `size` ranks cannot share this model. quantized: how its weights are rounded."""
    reason = _reason(config, geometry, size, quantized)
    if reason is None:
        return
    ways = []
    if smaller := [
        s for s in _SIZES if s < size and _reason(config, geometry, s, quantized) is None
    ]:
        ways.append(WayOut("take fewer ranks", (_FLAG, str(smaller[0]))))
    raise NotServable(
        f"{_FLAG} {size} cannot be had for {geometry.architecture}",
        why=reason,
        ways_out=(*ways, WayOut("run on one device", (_FLAG, "1"))),
    )


def _reason(
    config: Mapping[str, Any], geometry: ModelGeometry, size: int, quantized: str | None
) -> str | None:
    if geometry.model_type not in RULES:
        return f"Kvant divides {', '.join(RULES)}, not {geometry.model_type}"
    if quantized is not None:
        return f"weights quantised by {quantized} are not divided"
    for layer in geometry.layers:
        q, kv = layer.num_q_heads, layer.num_kv_heads
        if q % size:
            return f"its {q} query heads do not divide among {size} ranks"
        if kv % size and size % kv:
            return f"its {kv} KV heads divide neither among {size} ranks nor {size} by them"
    for name in ("intermediate_size", "moe_intermediate_size"):
        width = config.get(name)
        if isinstance(width, int) and width % size:
            return f"its {name} {width} does not divide among {size} ranks"
    return None


def rank_weight_bytes(
    whole: int, weights: Iterable[Weight], geometry: ModelGeometry, size: int, element_bytes: int
) -> int:
    """Bytes of the largest rank's weights. whole: bytes of the undivided model, of numbers.

    weights: the model's, as `kvant.models.weights` lists them.
    """
    cuts = Cuts(geometry, Shard(0, size))
    for weight in weights:
        is_matrix = weight.kind is not WeightKind.OTHER
        shape = (weight.rows, weight.columns) if is_matrix else (weight.columns,)
        name = weight.name
        if is_matrix or not name.endswith(".bias"):
            name += ".weight"
        cut = cuts.of(name, shape)
        if cut is not None:
            whole -= int(weight.numel * (1 - cut.share)) * element_bytes
    return whole


def replicated(geometry: ModelGeometry, size: int, *, tied: bool) -> tuple[str, ...]:
    """What every rank holds whole, in words."""
    found = ["the embedding (which is the head too)" if tied else "the embedding", "norms"]
    if geometry.model_type in ("mixtral", "qwen3_moe", "gpt_oss"):
        found.append("routers")
    few = sorted({g.num_kv_heads for g in geometry.layers if 0 < g.num_kv_heads < size})
    for count in few:
        found.append(
            f"KV heads: {size // count} ranks store each of the {count}, so capacity stops growing "
            f"at {count} ranks"
        )
    return tuple(found)
