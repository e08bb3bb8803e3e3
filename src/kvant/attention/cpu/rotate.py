"""The Walsh-Hadamard rotation of one row in memory, in the order of sums of `kvant.kv.codecs.rotation`."""

from __future__ import annotations

from numba import njit

from kvant.kernels.cpu.vector import load_f32, store_f32


@njit
def rotate_in_place(row: int, n: int) -> None:
    """Multiplies a float32 row [n] at an address by H in every block; does not divide by the block length."""
    block = n & -n
    step = 1
    while step < block:
        for start in range(0, n, 2 * step):
            for i in range(start, start + step):
                low, high = row + 4 * i, row + 4 * (i + step)
                a, b = load_f32(low), load_f32(high)
                store_f32(low, a + b)
                store_f32(high, a - b)
        step *= 2
