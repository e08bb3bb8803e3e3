"""Functions of all sampling kernels: the order of logits, their weights, and the bound of min_p.

The weight of the likeliest token is 1. A logit's place is its float32 as an integer in the same order.
Logits in float64 are rounded to float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):  # type: ignore[no-untyped-def]
    """Maps a float32 to its place, an int32 in the same order; both zeros have one place."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number(place):  # type: ignore[no-untyped-def]
    """Maps a place back to its float32; a place below all floats becomes -inf."""
    place = tl.maximum(place, -2139095041)
    bits = place ^ ((place >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def roughly(x, best, temperature):  # type: ignore[no-untyped-def]
    """Returns the weight exp((x - best) / temperature) in float32."""
    cold = 1.4426950408889634 / tl.minimum(tl.maximum(temperature, 1e-30), 1e38)
    return tl.exp2((x - best) * cold.to(tl.float32))


@triton.jit
def weight(x, best, temperature):  # type: ignore[no-untyped-def]
    """Returns the weight exp((x - best) / temperature) in float64."""
    cold = 1.0 / tl.maximum(temperature, 1e-300)  # one division for many numbers
    return tl.exp((x.to(tl.float64) - best.to(tl.float64)) * cold)


@triton.jit
def least(best, temperature, min_p):  # type: ignore[no-untyped-def]
    """Returns the smallest float32 logit that min_p keeps."""
    exact = best.to(tl.float64) + temperature * tl.log(tl.maximum(min_p, 1e-300))
    near = exact.to(tl.float32)
    near = tl.where(near.to(tl.float64) < exact, number(ordered(near) + 1), near)
    return tl.where(min_p > 0.0, near, float("-inf"))


@triton.jit
def row_of(logits, stride, rows, numbers, tokens, program):  # type: ignore[no-untyped-def]
    """Returns a program's row pointer, largest logit, temperature, and whether its token is sampled."""
    row = logits + tl.load(rows + program).to(tl.int64) * stride
    best = tl.load(row + tl.load(tokens + program)).to(tl.float32)
    temperature = tl.load(numbers + program * 5)
    return (
        row,
        best,
        temperature,
        (temperature > 0.0) & (best > float("-inf")) & (best < float("inf")),
    )
