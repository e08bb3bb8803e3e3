"""Divides weights that a checkpoint stores in narrow formats: their codes, scales and zero points.

A layer's tensors are divided at the same outputs or inputs as its weight. One entry of a tensor may cover
several outputs or inputs: packed codes, or a scale that a block shares.
"""

from __future__ import annotations

from collections.abc import Callable

from kvant.models.sharding.cuts import Cut
from kvant.weights.format import Scheme
from kvant.weights.parts import parts_of

CutOf = Callable[[str, tuple[int, ...]], Cut | None]
"""Maps a tensor's name and whole shape to a rank's part of it; None for all."""


def cut_part(
    scheme: Scheme, short: str, shape: tuple[int, ...], whole: tuple[int, int], cut: Cut
) -> Cut | None:
    """Returns a rank's part of one tensor [*shape] of a layer; None for all of it.

    short: the tensor's name after the layer's. whole: the layer's outputs and inputs. cut: of its weight.
    """
    along = cut.dim % 2
    doubled = tuple(2 * size if place == along else size for place, size in enumerate(whole))
    known = parts_of(scheme, *whole).get(short)
    if known is None or shape not in known.shapes:
        return None  # loading refuses such a tensor by its name
    grown = parts_of(scheme, *doubled)[short].shapes[known.shapes.index(shape)]
    dims = [place for place, size in enumerate(shape) if grown[place] != size]
    if not dims:
        return None
    (dim,) = dims
    count, width = shape[dim], whole[along]
    block = scheme.format.rows if along == 0 else scheme.format.columns
    unit = width // count if width % count == 0 else block
    ranges = tuple((start // unit, -(-end // unit)) for start, end in cut.ranges)
    return Cut(cut.rule, dim - len(shape), ranges, count)
