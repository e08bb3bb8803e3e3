"""A plan's view of tensor parallelism: what can be divided, what each rank holds, and refusals. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvant.errors import NotServable, WayOut
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.models.geometry.parameters import Weight, WeightKind
from kvant.models.sharding.cuts import RULES, Cut, Cuts
from kvant.models.sharding.shard import Shard, recurrence_of
from kvant.weights.format import WeightFormat

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


FormatOf = Callable[[Weight, int, int], WeightFormat | None]
"""A weight, and the outputs and inputs that a rank holds -> its narrow format; None for numbers."""


def check_division(
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    size: int,
    narrow: tuple[Iterable[Weight], FormatOf] | None = None,
) -> None:
    """Raise NotServable if `size` ranks cannot share this model. narrow: its weights, and their formats."""

    def reason_for(size: int) -> str | None:
        found = _reason(config, geometry, size)
        if found is None and narrow is not None:
            found = _refuse_narrow(*narrow, geometry, size)
        return found

    reason = reason_for(size)
    if reason is None:
        return
    ways = []
    if smaller := [s for s in _SIZES if s < size and reason_for(s) is None]:
        ways.append(WayOut("take fewer ranks", (_FLAG, str(smaller[0]))))
    raise NotServable(
        f"{_FLAG} {size} cannot be had for {geometry.architecture}",
        why=reason,
        ways_out=(*ways, WayOut("run on one device", (_FLAG, "1"))),
    )


def _reason(config: Mapping[str, Any], geometry: ModelGeometry, size: int) -> str | None:
    if geometry.model_type not in RULES:
        return f"Kvant divides {', '.join(RULES)}, not {geometry.model_type}"
    for layer in geometry.layers:
        q, kv = layer.num_q_heads, layer.num_kv_heads
        if q % size:
            return f"its {q} query heads do not divide among {size} ranks"
        if kv % size and size % kv:
            return f"its {kv} KV heads divide neither among {size} ranks nor {size} by them"
        found = recurrence_of(layer)
        if layer.states and found is None:
            return "its layers keep states that are not divided by heads"
        if found is not None and (found.heads % size or found.key_heads % size):
            return (
                f"the {found.heads} heads and {found.key_heads} heads of keys of its recurrent layers "
                f"do not divide among {size} ranks"
            )
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        width = config.get(name)
        if isinstance(width, int) and width % size:
            return f"its {name} {width} does not divide among {size} ranks"
    return None


def _refuse_narrow(
    weights: Iterable[Weight], format_of: FormatOf, geometry: ModelGeometry, size: int
) -> str | None:
    """Why narrow weights cannot be cut where ranks cut them; None if they can."""
    every = [Cuts(geometry, Shard(rank, size)) for rank in range(size)]
    for weight in weights:
        for cuts in every:
            cut = _cut_of(weight, cuts)
            if cut is None:
                continue
            along = cut.dim % 2
            held = weight.columns if along == 0 else cut.length
            rows = cut.length if along == 0 else weight.rows
            fmt = format_of(weight, rows, held)
            if fmt is None:
                continue
            shared = fmt.rows if along == 0 else fmt.columns
            # Codes of 4 bits lie in words of eight outputs or inputs, those of 8 bits in words of four.
            unit = max(shared, 32 // fmt.code.bits)
            ends = [end for one in cut.ranges for end in one]
            # Experts are joined, and share no scale with the next one.
            within = weight.kind is not WeightKind.EXPERT and _within(cut, unit, shared)
            if any(end % unit for end in ends) and not within:
                what = "inputs" if along else "outputs"
                return f"ranks would cut groups of {unit} {what} of {weight.name} ({fmt.summary})"
            refusal = fmt.refuse(rows, held)
            if refusal is not None:
                return f"a rank's part of {weight.name} has no products: {refusal}"
    return None


def _within(cut: Cut, unit: int, shared: int) -> bool:
    """Whether every range lies within one block that shares a scale, in a format of whole bytes."""
    return shared == unit and all(start // unit == (end - 1) // unit for start, end in cut.ranges)


def _cut_of(weight: Weight, cuts: Cuts) -> Cut | None:
    """What a rank holds of a listed weight."""
    is_matrix = weight.kind is not WeightKind.OTHER
    shape = (weight.rows, weight.columns) if is_matrix or weight.rows > 1 else (weight.columns,)
    name = weight.name
    if is_matrix or not name.endswith(".bias"):
        name += ".weight"
    return cuts.of(name, shape)


def rank_weight_bytes(
    whole: int,
    weights: Iterable[Weight],
    geometry: ModelGeometry,
    size: int,
    bytes_of: Callable[[Weight], int],
) -> int:
    """Bytes of the largest rank's weights. whole: bytes of the undivided model.

    weights: the model's, as `kvant.models.weights` lists them. bytes_of: what each takes in memory.
    """
    cuts = Cuts(geometry, Shard(0, size))
    for weight in weights:
        cut = _cut_of(weight, cuts)
        if cut is not None:
            whole -= int(bytes_of(weight) * (1 - cut.share))
    return whole


def replicated(geometry: ModelGeometry, size: int, *, tied: bool) -> tuple[str, ...]:
    """What every rank holds whole, in words."""
    found = ["the embedding (which is the head too)" if tied else "the embedding", "norms"]
    if any(rule.name.startswith("EXPERT") for rule in RULES[geometry.model_type].values()):
        found.append("routers")  # of families that may have experts
    if any(layer.attention is Attention.MLA for layer in geometry.layers):
        found.append(
            "latents: every rank stores them all, so capacity grows by memory of weights alone"
        )
        return tuple(found)
    few = sorted({g.num_kv_heads for g in geometry.layers if 0 < g.num_kv_heads < size})
    for count in few:
        found.append(
            f"KV heads: {size // count} ranks store each of the {count}, so capacity stops growing "
            f"at {count} ranks"
        )
    return tuple(found)
