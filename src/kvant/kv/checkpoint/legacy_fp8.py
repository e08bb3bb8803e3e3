"""Plain fp8 checkpoints (AutoFP8 and its heirs): `quant_method: fp8`.

Most declare nothing about KV; scale tensors in the files are the only hint, which is no wish.
Some have `kv_cache_scheme: "static"`, which means fp8 with scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvant.kv.checkpoint.declaration import Declaration, unreadable
from kvant.kv.checkpoint.facts import KVWish, ScalePromise
from kvant.kv.dtype import KVDtype

KEY = "kv_cache_scheme"


def read(config: Mapping[str, Any], where: str) -> Declaration | None:
    """Returns the KV part of an fp8 config; None where it has no `kv_cache_scheme`."""
    if KEY not in config:
        return None
    asked, place = config[KEY], f"{where}.{KEY}"
    if asked is None:
        return Declaration(place, "none")
    if asked == "static":
        wish = KVWish(KVDtype.FP8_E4M3, KVDtype.FP8_E4M3, place, ScalePromise.STATIC)
        return Declaration(place, "FP8", wish)
    return unreadable(place, f"{asked!r}", "with quant_method fp8, Kvant reads `static`")


def scales_hint(num_scales: int) -> str:
    """Returns the note of a plan for scales that exist but that no option asked for."""
    scales = f"{num_scales} KV scale{'s' if num_scales > 1 else ''}"
    flag = f"--kv-cache-dtype {KVDtype.FP8_E4M3.format.name}"
    return f"the checkpoint declares no KV format but has {scales}; {flag} uses them"
