"""Flags that exist elsewhere and that Kvant refuses, with the reason and what to use instead."""

from __future__ import annotations

from kvant.errors import NotServable, WayOut


def refuse_calculated_scales(asked: bool) -> None:
    """Scales guessed from the first tokens are frozen guesses; Kvant has no such mode."""
    if asked:
        raise NotServable(
            "--calculate-kv-scales is not offered",
            why="scales taken from whatever comes first, warm-up included, decide every later answer",
            ways_out=(
                WayOut("let each row carry its scale", ("--kv-cache-dtype", "fp8_per_token_head")),
                WayOut("use a checkpoint with calibrated k_scale and v_scale"),
            ),
        )


def refuse_tensor_parallel(size: int) -> None:
    if size > 1:
        raise NotServable(
            f"--tensor-parallel-size {size} is not offered yet",
            why="Kvant runs on one device so far",
            ways_out=(WayOut("run on one device", ("--tensor-parallel-size", "1")),),
        )
