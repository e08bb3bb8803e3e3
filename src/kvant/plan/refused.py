"""Flags of other engines that Kvant refuses, with the reason and an alternative."""

from __future__ import annotations

from kvant.errors import NotServable, WayOut


def refuse_calculated_scales(asked: bool) -> None:
    """Raises NotServable if `asked`: --calculate-kv-scales would compute scales from the first tokens."""
    if asked:
        raise NotServable(
            "--calculate-kv-scales is not offered",
            why="scales computed from the first tokens, warm-up included, would decide every later answer",
            ways_out=(
                WayOut("let each row carry its scale", ("--kv-cache-dtype", "fp8_per_token_head")),
                WayOut("use a checkpoint with calibrated k_scale and v_scale"),
            ),
        )
