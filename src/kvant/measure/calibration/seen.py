"""Statistics of a model's keys, values and queries on a text: histograms, moments and one sample.

All of them are sums over tokens. So a text of any length takes bounded memory, parts can be kept on disk,
and the sum of the parts is the statistics of the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvant.attention.base import AttentionBackend, AttentionParams, Step
from kvant.kv.codecs.rotation import rotate
from kvant.kv.format import Side
from kvant.kv.pool import LayerCache
from kvant.kv.spec import KVPlan

LOWEST, HIGHEST = -40, 40
"""Exponents of the histogram's range; magnitudes outside are counted in its first and last bin."""
PER_OCTAVE = 32
NUM_BINS = (HIGHEST - LOWEST) * PER_OCTAVE
SAMPLE_TOKENS = 192

_SHIFT = 23 - PER_OCTAVE.bit_length() + 1  # float32's mantissa without its upper bits
_FIRST = (LOWEST + 127) * PER_OCTAVE


def bin_of(magnitudes: Tensor) -> Tensor:
    """Returns the bin of each magnitude, int64 [..]: 32 equal steps per octave.

    float32 [..], not negative.
    """
    return ((magnitudes.contiguous().view(torch.int32) >> _SHIFT).long() - _FIRST).clamp_(
        0, NUM_BINS - 1
    )


def bin_edges() -> npt.NDArray[np.float64]:
    """Returns the lower edges of all bins and the last bin's upper edge, [NUM_BINS + 1]."""
    place = np.arange(NUM_BINS + 1)
    octave, step = np.divmod(place, PER_OCTAVE)
    return np.asarray(2.0 ** (octave + LOWEST) * (1 + step / PER_OCTAVE), dtype=np.float64)


@dataclass(slots=True)
class SideSeen:
    """Statistics of the rows of one side of one layer.

    counts: [num_kv_heads, NUM_BINS] int64, by magnitude, without zeros. largest: [num_kv_heads] float64,
    largest magnitudes. broken: how many numbers are NaN or infinite. numbers: how many there are.
    """

    counts: npt.NDArray[np.int64]
    largest: npt.NDArray[np.float64]
    broken: int = 0
    numbers: int = 0

    def add(self, rows: Tensor) -> None:
        """Adds rows [tokens, num_kv_heads, head_dim], of any floating dtype, to the statistics."""
        size = rows.detach().float().abs()
        finite = size.isfinite()
        self.broken += int((~finite).sum())
        self.numbers += size.numel()
        size = torch.where(finite, size, 0.0)
        heads = size.shape[1]
        places = bin_of(size) + NUM_BINS * torch.arange(heads, device=size.device)[:, None]
        counts = torch.bincount(places[size > 0], minlength=heads * NUM_BINS)
        self.counts += counts.view(heads, NUM_BINS).cpu().numpy()
        found = size.amax((0, 2)).double().cpu().numpy()
        self.largest = np.maximum(self.largest, found)


@dataclass(slots=True)
class LayerSeen:
    """Statistics of one layer that stores KV.

    moment: [num_kv_heads, head_dim, head_dim] float64, the sum of q q^T over the rotated queries that read
    the head (see `kvant.kv.codecs.rotation`). queries: their number per head. sample: q, k and v of the first
    tokens, float32 [tokens, heads, head_dim]. params: the attention's scale and window.
    """

    k: SideSeen
    v: SideSeen
    moment: npt.NDArray[np.float64]
    queries: int
    sample: dict[str, Tensor]
    params: AttentionParams | None = None

    def side(self, side: Side) -> SideSeen:
        return self.k if side is Side.K else self.v


Seen = dict[int, LayerSeen]
"""Statistics by layer index, of layers that store both K and V."""


class SeeingBackend:
    """Forwards all calls to another backend and adds the rows that pass to `seen`."""

    def __init__(self, inner: AttentionBackend, seen: Seen) -> None:
        self.name = inner.name
        self._inner = inner
        self._seen = seen

    def write(self, cache: LayerCache, k: Tensor, v: Tensor | None, step: Step) -> None:
        """Adds k and v [T, num_kv_heads, head_dim] to the statistics; then `AttentionBackend.write`."""
        layer = self._seen.get(cache.spec.geometry.index)
        if layer is not None:
            assert v is not None, "layers that store K alone are not among them"
            layer.k.add(k)
            layer.v.add(v)
            if len(layer.sample) < 2:
                layer.sample |= {"k": _first(k), "v": _first(v)}
        self._inner.write(cache, k, v, step)

    def attend(self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
        """Adds q [T, num_q_heads, head_dim] to the statistics; then `AttentionBackend.attend`."""
        layer = self._seen.get(cache.spec.geometry.index)
        if layer is not None:
            heads = cache.spec.geometry.num_kv_heads
            rotated = rotate(q.detach().float()).view(q.shape[0], heads, -1, q.shape[2])
            grouped = rotated.permute(1, 0, 2, 3).flatten(1, 2).double()
            layer.moment += torch.bmm(grouped.mT, grouped).cpu().numpy()
            layer.queries += grouped.shape[1]
            if "q" not in layer.sample:
                layer.sample["q"] = _first(q)
                layer.params = params
        return self._inner.attend(cache, q, step, params)


def _first(rows: Tensor) -> Tensor:
    return rows[:SAMPLE_TOKENS].detach().float().cpu().clone()


def nothing_seen(plan: KVPlan) -> Seen:
    """Returns empty statistics for every layer of a plan that stores both K and V."""
    found: Seen = {}
    for spec in plan.layers:
        g = spec.geometry
        if spec.k is None or spec.v is None:
            continue
        heads = g.num_kv_heads
        k, v = (SideSeen(np.zeros((heads, NUM_BINS), np.int64), np.zeros(heads)) for _ in range(2))
        moment = np.zeros((heads, g.head_dim_k, g.head_dim_k))
        found[g.index] = LayerSeen(k, v, moment, 0, {})
    return found


def pack(seen: Seen) -> dict[str, npt.NDArray[np.generic]]:
    """Returns statistics as arrays by name, to be kept on disk."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for index, layer in seen.items():
        for name, side in (("k", layer.k), ("v", layer.v)):
            arrays[f"{index}.{name}.counts"] = side.counts
            arrays[f"{index}.{name}.largest"] = side.largest
            arrays[f"{index}.{name}.numbers"] = np.array([side.broken, side.numbers])
        arrays[f"{index}.moment"] = layer.moment
        arrays[f"{index}.queries"] = np.array(layer.queries)
        for name, rows in layer.sample.items():
            arrays[f"{index}.sample.{name}"] = rows.numpy()
        if layer.params is not None:
            p = layer.params
            arrays[f"{index}.params"] = np.array([p.scale, p.window or 0, p.softcap])
    return arrays


def add_packed(seen: Seen, parts: Iterable[Mapping[str, npt.NDArray[np.generic]]]) -> None:
    """Adds statistics from `pack` to `seen`, in place. parts: the arrays of `pack`, in its shapes [..]."""
    for arrays in parts:
        for index, layer in seen.items():
            for name, side in (("k", layer.k), ("v", layer.v)):
                broken, numbers = arrays[f"{index}.{name}.numbers"].tolist()
                side.counts = side.counts + arrays[f"{index}.{name}.counts"].astype(np.int64)
                side.largest = np.maximum(
                    side.largest, arrays[f"{index}.{name}.largest"].astype(np.float64)
                )
                side.broken += broken
                side.numbers += numbers
            layer.moment = layer.moment + arrays[f"{index}.moment"].astype(np.float64)
            layer.queries += int(arrays[f"{index}.queries"])
            if layer.params is None and f"{index}.params" in arrays:
                scale, window, softcap = arrays[f"{index}.params"].tolist()
                layer.params = AttentionParams(scale, int(window) or None, softcap)
                for name in ("q", "k", "v"):
                    layer.sample[name] = torch.from_numpy(arrays[f"{index}.sample.{name}"])
