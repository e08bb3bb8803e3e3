"""Plans tensor parallelism: checks that a model can be divided, and counts each rank's bytes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvant.errors import NotServable, WayOut
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.models.geometry.parameters import Weight, WeightKind
from kvant.models.sharding.cuts import RULES, Cut, Cuts, Indivisible
from kvant.models.sharding.shard import Shard, recurrence_of
from kvant.weights.format import WeightFormat

_FLAG = "--tensor-parallel-size"
_SIZES = (8, 4, 2, 16, 3, 5, 6, 7)
"""Numbers of ranks that a refusal tries, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Division:
    """How `size` ranks share a model.

    whole_bytes: weights of the undivided model, None if unknown. replicated: descriptions of the parts that
    every rank has whole.
    """

    size: int
    whole_bytes: int | None
    replicated: tuple[str, ...]


FormatOf = Callable[[Weight, int], WeightFormat | None]
"""Maps a weight, and a rank's number of its inputs, to its narrow format; None if it is wide."""


Named = tuple[str, tuple[int, ...]]
"""A weight's name in modules, and its shape."""


def named(weights: Iterable[Weight]) -> Iterator[Named]:
    """Converts listed weights to their names in modules, and their shapes."""
    for weight in weights:
        is_whole = weight.kind is WeightKind.OTHER and weight.name.endswith("bias")
        yield weight.name if is_whole else f"{weight.name}.weight", weight.dims


def check_division(
    geometry: ModelGeometry,
    size: int,
    parameters: Callable[[], Iterable[Named]],
    narrow: tuple[Iterable[Weight], FormatOf] | None = None,
) -> None:
    """Raises NotServable if `size` ranks cannot share this model.

    parameters: returns its weights; only called if the family can be divided. narrow: the weights that a
    recipe may make narrow, and their formats.
    """

    def reason_for(size: int) -> str | None:
        found = _reason(geometry, size, parameters)
        if found is None and narrow is not None:
            found = _refuse_narrow(*narrow, geometry, size)
        return found

    reason = reason_for(size)
    if reason is None:
        return
    ways = []
    if fits := next((s for s in _SIZES if s < size and reason_for(s) is None), 0):
        ways.append(WayOut("take fewer ranks", (_FLAG, str(fits))))
    elif fits := next((s for s in sorted(_SIZES) if s > size and reason_for(s) is None), 0):
        ways.append(WayOut("take more ranks", (_FLAG, str(fits))))
    raise NotServable(
        f"{_FLAG} {size} cannot be had for {geometry.architecture}",
        why=reason,
        ways_out=(*ways, WayOut("run on one device", (_FLAG, "1"))),
    )


def _reason(
    geometry: ModelGeometry, size: int, parameters: Callable[[], Iterable[Named]]
) -> str | None:
    if geometry.model_type not in RULES:
        return f"Kvant divides {', '.join(RULES)}, not {geometry.model_type}"
    for layer in geometry.layers:
        q, kv = layer.num_q_heads, layer.num_kv_heads
        if q % size:
            return f"its {q} query heads do not divide among {size} ranks"
        if kv % size and size % kv:
            return f"its {kv} KV heads divide neither among {size} ranks nor {size} by them"
        found = recurrence_of(layer)
        if found is None:
            continue
        if found.heads % size:
            return (
                f"the {found.heads} heads of its recurrent layers do not divide among {size} ranks"
            )
        if found.key_heads % size and size % found.key_heads:
            return (
                f"the {found.key_heads} heads of keys (groups) of its recurrent layers divide neither "
                f"among {size} ranks nor {size} by them"
            )
    cuts = Cuts(geometry, Shard(0, size))
    try:
        for name, shape in parameters():
            cuts.of(name, shape)
    except Indivisible as fault:
        return str(fault)
    return None


def _refuse_narrow(
    weights: Iterable[Weight], format_of: FormatOf, geometry: ModelGeometry, size: int
) -> str | None:
    """Returns why narrow weights cannot be cut at the ranks' boundaries; None if they can."""
    every = [Cuts(geometry, Shard(rank, size)) for rank in range(size)]
    for weight in weights:
        for cuts in every:
            cut = _cut_of(weight, cuts)
            if cut is None:
                continue
            along = cut.dim % 2
            rows = cut.length if along == 0 else weight.rows
            columns = weight.columns if along == 0 else cut.length
            fmt = format_of(weight, columns)
            if fmt is None:
                continue
            shared = fmt.rows if along == 0 else fmt.columns
            # A 32-bit word has eight codes of 4 bits, or four codes of 8 bits.
            unit = max(shared, 32 // fmt.code.bits)
            ends = [end for one in cut.ranges for end in one]
            # Experts are joined, so a rank's part must not share a scale with another rank's.
            within = weight.kind is not WeightKind.EXPERT and _within(cut, unit, shared)
            if any(end % unit for end in ends) and not within:
                what = "inputs" if along else "outputs"
                return f"ranks would cut groups of {unit} {what} of {weight.name} ({fmt.summary})"
            refusal = fmt.refuse(rows, columns)
            if refusal is not None:
                return f"a rank's part of {weight.name} has no products: {refusal}"
    return None


def _within(cut: Cut, unit: int, shared: int) -> bool:
    """Returns whether every range is within one block that shares a scale, and codes need no packing."""
    return shared == unit and all(start // unit == (end - 1) // unit for start, end in cut.ranges)


def _cut_of(weight: Weight, cuts: Cuts) -> Cut | None:
    """Returns a rank's part of a listed weight."""
    ((name, shape),) = named([weight])
    return cuts.of(name, shape)


def rank_weight_bytes(
    whole: int, sized: Iterable[tuple[Named, int]], geometry: ModelGeometry, size: int
) -> int:
    """Returns the bytes of the largest rank's weights. whole: bytes of the undivided model.

    sized: the model's weights, with the bytes of each in memory.
    """
    cuts = Cuts(geometry, Shard(0, size))
    for (name, shape), num_bytes in sized:
        cut = cuts.of(name, shape)
        if cut is not None:
            whole -= int(num_bytes * (1 - cut.share))
    return whole


def replicated(
    geometry: ModelGeometry, size: int, parameters: Iterable[Named], *, tied: bool
) -> tuple[str, ...]:
    """Describes the parts of a model that every rank has whole."""
    cuts, names = Cuts(geometry, Shard(0, size)), [name for name, _ in parameters]
    found = ["the embedding (which is the head too)" if tied else "the embedding", "norms"]
    if any(".experts." in name for name in names):
        found.append("routers")
    if any(map(cuts.is_tower, names)):
        found.append("towers of images and sound")
    few_keys = {one.key_heads for layer in geometry.layers if (one := recurrence_of(layer))}
    for count in sorted(few_keys):
        if count < size:
            found.append(
                f"heads of keys (groups) of recurrent layers: {size // count} ranks hold each of the {count}"
            )
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
