"""Divides a planned model among ranks: refusals, and the bytes of one rank's weights. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvant.errors import NotServable, WayOut
from kvant.models.file_names import AS_MODULES, FileNames
from kvant.models.geometry.parameters import Weight
from kvant.models.geometry.weight_recipe import Recipe, read_recipe
from kvant.models.quantization import format_of, rounds
from kvant.models.shape import ModelShape
from kvant.models.sharding.divided import (
    Division,
    FormatOf,
    Named,
    check_division,
    named,
    rank_weight_bytes,
    replicated,
)
from kvant.models.stored import NotStored, Stored, read_blocks, read_stored
from kvant.models.weights import (
    ELEMENT_BYTES,
    list_weights,
    place_of_layers,
    weights_in_files,
)
from kvant.plan.plan import PlannedModel, PlanRequest
from kvant.speculative.methods import METHODS
from kvant.weights.format import WeightFormat


def check_ranks(request: PlanRequest, config: Mapping[str, Any], shape: ModelShape) -> None:
    """Raises NotServable if ranks cannot share the target; formats of weights are checked by `divide`."""

    def parameters() -> Iterable[Named]:
        return shape.parameters or named(list_weights(config, shape.geometry))

    check_division(shape.geometry, request.tensor_parallel_size, parameters)
    asked = request.speculative
    if asked is not None and asked.method not in METHODS:
        raise NotServable(
            f"--tensor-parallel-size {request.tensor_parallel_size} cannot be had with the "
            f"method {asked.method.name}",
            why="other ranks would have to run it too, which only Kvant's own methods do",
            ways_out=(
                WayOut("draft with ngram or dflash"),
                WayOut("run on one device", ("--tensor-parallel-size", "1")),
            ),
        )


def divide(
    request: PlanRequest, target: PlannedModel, *, drafts: bool
) -> tuple[PlannedModel, Division]:
    """Returns the target with the bytes of one rank's weights, and how ranks share it.

    drafts: there is a drafter, which every rank holds whole. Raises NotServable for narrow weights that
    ranks cannot divide.
    """
    geometry, whole, ranks = target.geometry, target.weights, request.tensor_parallel_size
    stored = _kept_narrow(request, target)
    narrow = _narrow_formats(request, target, stored)
    element = ELEMENT_BYTES[target.kv.compute_dtype]
    sized = [(one, math.prod(one[1]) * element) for one in target.parameters]
    if narrow is not None or not target.parameters:
        listed = _weights(target, AS_MODULES if stored is None else stored.names)
        recipe = None if request.quantization is not None else read_recipe(target.config)

        def bytes_of(weight: Weight) -> int:
            """Returns a weight's bytes, counted in the same way as `whole`."""
            found = None
            if isinstance(recipe, Recipe):
                found = recipe.stored_bytes(weight)
            elif narrow is not None and (fmt := narrow(weight, weight.columns)):
                found = weight.copies * fmt.matrix_bytes(weight.rows, weight.columns)
            return weight.numel * element if found is None else found

        sized = list(zip(named(listed), map(bytes_of, listed), strict=True))
        if narrow is not None:
            check_division(geometry, ranks, lambda: named(listed), (listed, narrow))
    if whole.bytes is not None:
        of_rank = rank_weight_bytes(whole.bytes, sized, geometry, ranks)
        weights = replace(whole, bytes=of_rank, reason=f"{whole.reason}; of one of {ranks} ranks")
        target = replace(target, weights=weights)
    names = [one for one, _ in sized]
    kept = replicated(geometry, ranks, names, tied=all("lm_head" not in name for name, _ in names))
    if drafts:
        kept = (*kept, "the drafter, with its KV cache")
    return target, Division(ranks, whole.bytes, kept)


def _weights(target: PlannedModel, names: FileNames) -> tuple[Weight, ...]:
    """Returns the target's weights by their names in files. names: of experts' matrices."""
    found = weights_in_files(target.config, target.geometry, target.parameters, names)
    assert not isinstance(found, str), found  # `check_ranks` listed them
    return found


def _narrow_formats(
    request: PlanRequest, target: PlannedModel, stored: Stored | None
) -> FormatOf | None:
    """Returns a function that gives each weight's narrow format in memory; None if no weight is narrow.

    stored: how the files store weights that stay narrow.
    """
    asked = request.quantization
    if asked is not None:
        layers = place_of_layers(target.geometry)

        def rounded(weight: Weight, columns: int) -> WeightFormat | None:
            return format_of(asked, columns) if rounds(weight, layers) else None

        return rounded
    if stored is None:
        return None

    def kept(weight: Weight, _columns: int) -> WeightFormat | None:
        scheme = stored.scheme(weight.name) if weight.is_product else None
        return None if scheme is None else scheme.format

    return kept


def _kept_narrow(request: PlanRequest, target: PlannedModel) -> Stored | None:
    """Returns how the files store weights that stay narrow; None if none does.

    Raises NotServable for narrow weights that do not run as they are stored.
    """
    if request.quantization is not None:
        return None
    stored: Stored | NotStored | None = None
    if read_blocks(target.config) is not None:
        stored = NotStored("the blocks of GGUF files are not divided yet")
    elif _is_narrow(target):
        stored = read_stored(target.config, request.device, target.kv.compute_dtype)
        if isinstance(stored, Stored) and stored.is_reordered:
            stored = NotStored(
                "groups of inputs in another order (act-order) belong to several ranks"
            )
        if stored is not None and request.on_cpu:
            stored = NotStored("on a CPU the compiled forward reads them, which runs one rank")
    if isinstance(stored, NotStored):
        raise _not_divided(request, target, stored.reason)
    return stored


def _is_narrow(target: PlannedModel) -> bool:
    """Returns whether any weight is narrow in the files. A recipe may concern the KV cache only."""
    recipe = read_recipe(target.config)
    if not isinstance(recipe, Recipe):
        return recipe is not None
    weights = _weights(target, AS_MODULES)
    return any(recipe.stored_bytes(weight) is not None for weight in weights)


def _not_divided(request: PlanRequest, target: PlannedModel, reason: str) -> NotServable:
    return NotServable(
        f"--tensor-parallel-size {request.tensor_parallel_size} cannot be had for the narrow weights "
        f"of {target.local.name}",
        why=f"ranks divide them where they run as they are stored: {reason}",
        ways_out=(WayOut("run on one device", ("--tensor-parallel-size", "1")),),
    )
