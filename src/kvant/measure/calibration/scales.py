"""Computes static scales of fp8_e4m3 from statistics: four methods, per tensor or per KV head.

    absmax       the largest magnitude becomes the largest code
    percentile   99.99 % of the magnitudes do not saturate
    mse          least squared error of the stored numbers
    kl           keys: least KL divergence of the attention's probabilities, on a sample of queries;
                 values: least squared error of the attention's output, which is no distribution

mse and kl choose a factor of absmax' scale from `FACTORS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvant.errors import BadValue, WayOut
from kvant.kv.checkpoint.scales import LARGEST, SMALLEST
from kvant.kv.codecs.float8 import FLOAT8
from kvant.kv.format import Encoding, Side
from kvant.measure.calibration.seen import LayerSeen, Seen, SideSeen, bin_edges

PERCENTILE = 0.9999
FACTORS = tuple(2.0 ** (-step / 8) for step in range(-4, 25))
_E4M3 = FLOAT8[Encoding.E4M3FN]
_POINTS = 4  # points of a bin at which its numbers are assumed

Scales = dict[tuple[int, Side], Tensor]
"""Scales, float32 [1] or [num_kv_heads], by layer index and side."""


class Method(Enum):
    ABSMAX = "absmax"
    PERCENTILE = "percentile"
    MSE = "mse"
    KL = "kl"


class Sharing(Enum):
    """Which numbers share a scale: the strategies of compressed-tensors."""

    TENSOR = "tensor"
    HEAD = "attn_head"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Scales of one method."""

    method: Method
    sharing: Sharing
    scales: Mapping[tuple[int, Side], Tensor]

    @property
    def name(self) -> str:
        return f"{self.method.value} per {'tensor' if self.sharing is Sharing.TENSOR else 'head'}"


def check_seen(seen: Seen, names: Mapping[int, str]) -> None:
    """Raises BadValue, naming layer and side, if a scale would be 0, NaN or infinite.

    names: of the layers' attention modules, by index.
    """
    for index, layer in seen.items():
        for side in Side:
            one = layer.side(side)
            what = f"the {side.value}_scale of layer {index} ({names[index]})"
            if one.broken:
                raise BadValue(
                    f"{what} comes out NaN",
                    why=f"{one.broken} of {one.numbers} numbers are NaN or infinite on this text",
                    ways_out=(WayOut("compute in a wider dtype", ("--dtype", "float32")),),
                )
            for head, largest in enumerate(one.largest.tolist()):
                scale = largest / _E4M3.max
                if not SMALLEST <= scale <= LARGEST:
                    said = "0" if largest == 0 else f"{scale:g}"
                    raise BadValue(
                        f"{what} comes out {said} in KV head {head}",
                        why=f"its largest magnitude on this text is {largest:g}, "
                        f"and a scale is a number from {SMALLEST:g} to {LARGEST:g}",
                        ways_out=(
                            WayOut("give text of the model's own domain", ("--text", "FILE")),
                        ),
                    )


def candidates(seen: Seen) -> list[Candidate]:
    """Returns candidates of every method, per tensor and per head. With one KV head these are equal."""
    found = []
    for sharing in Sharing:
        for method in Method:
            scales: Scales = {}
            for index, layer in seen.items():
                for side in Side:
                    values = _scales(layer, side, method, sharing)
                    scales[index, side] = torch.tensor(values, dtype=torch.float32)
            found.append(Candidate(method, sharing, scales))
    return found


def _scales(layer: LayerSeen, side: Side, method: Method, sharing: Sharing) -> list[float]:
    one = layer.side(side)
    heads = len(one.largest)
    groups = [list(range(heads))] if sharing is Sharing.TENSOR else [[h] for h in range(heads)]
    return [_scale(layer, side, method, group) for group in groups]


def _scale(layer: LayerSeen, side: Side, method: Method, heads: list[int]) -> float:
    one = layer.side(side)
    full = float(one.largest[heads].max()) / _E4M3.max
    if method is Method.ABSMAX:
        return full
    if method is Method.PERCENTILE:
        return min(full, _percentile(one, heads) / _E4M3.max)
    if method is Method.MSE:
        errors = _squared_errors(one.counts[heads].sum(0), full)
    else:
        errors = _attention_errors(layer, side, heads, full)
    best: float = FACTORS[errors.index(min(errors))]
    return full * best


def _percentile(one: SideSeen, heads: list[int]) -> float:
    """Returns the upper edge of the bin that contains the percentile."""
    counts = one.counts[heads].sum(0)
    reached = np.cumsum(counts) >= math.ceil(PERCENTILE * counts.sum())
    return float(bin_edges()[1 + int(np.argmax(reached))])


def _squared_errors(counts: npt.NDArray[np.int64], full: float) -> list[float]:
    """Returns the sum of squared errors for each of FACTORS times `full`."""
    edges = bin_edges()
    used = np.flatnonzero(counts)
    low, width = edges[used], np.diff(edges)[used]
    at = (np.arange(_POINTS) + 0.5) / _POINTS
    points = torch.from_numpy((low[:, None] + width[:, None] * at).astype(np.float32))
    weights = torch.from_numpy(counts[used].astype(np.float64))[:, None] / _POINTS
    return [
        float((weights * (_stored(points, full * factor) - points).double() ** 2).sum())
        for factor in FACTORS
    ]


def _attention_errors(layer: LayerSeen, side: Side, heads: list[int], full: float) -> list[float]:
    """Returns the loss of these heads' attention on the sample, for each of FACTORS times `full`."""
    assert layer.params is not None
    q, k, v = (layer.sample[name] for name in ("q", "k", "v"))
    group = q.shape[1] // k.shape[1]
    totals = np.zeros(len(FACTORS))
    for head in heads:
        rows = q[:, head * group : (head + 1) * group].flatten(0, 1)
        place = torch.arange(q.shape[0]).repeat_interleave(group)[:, None]
        other = torch.arange(k.shape[0])[None]
        hidden = other > place
        if layer.params.window is not None:
            hidden |= other <= place - layer.params.window
        exact = _log_probabilities(rows, k[:, head], hidden, layer)
        weights = exact.exp()
        for number, factor in enumerate(FACTORS):
            if side is Side.K:
                other_k = _stored(k[:, head], full * factor)
                off = exact - _log_probabilities(rows, other_k, hidden, layer)
                totals[number] += float((weights * off.masked_fill(hidden, 0.0)).sum())
            else:
                error = _stored(v[:, head], full * factor) - v[:, head]
                totals[number] += float(((weights @ error).double() ** 2).sum())
    found: list[float] = totals.tolist()
    return found


def _log_probabilities(q: Tensor, k: Tensor, hidden: Tensor, layer: LayerSeen) -> Tensor:
    """Returns log-probabilities [n, m] of queries [n, D] over keys [m, D], without sinks.

    -inf where hidden.
    """
    assert layer.params is not None
    scores = (q @ k.mT) * layer.params.scale
    cap = layer.params.softcap
    if cap:
        scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(hidden, -torch.inf).log_softmax(-1)


def _stored(x: Tensor, scale: float) -> Tensor:
    """Returns x [..] after it was stored in and read from the cache with this scale."""
    return _E4M3.decode(_E4M3.encode(x / scale)) * scale
