"""What a format costs in quality on models that were measured, for `kvant plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvant.kv.geometry import ModelGeometry
from kvant.kv.spec import KVPlan, ScaleState

_MEASURED = Path(__file__).with_name("measured_kl.json")
"""By geometry's fingerprint and format: mean KL divergence from the model's own dtype, in nats."""


def expected_kl(kv: KVPlan, geometry: ModelGeometry) -> str | None:
    """One line about the plan's KL divergence; None for the model dtype in every layer."""
    wide = kv.compute_dtype.kv_dtype
    if list(kv.formats) in ([], [str(wide)]):
        return None
    measured = json.loads(_MEASURED.read_text(encoding="utf-8"))
    found: dict[str, Any] | None = measured.get(geometry.fingerprint)
    entry = None
    is_plain = len(kv.formats) == 1 and not kv.has_wide_rows
    if found is not None and is_plain and not _is_calibrated_fp8(kv):
        entry = found["formats"].get(next(iter(kv.formats)))
    if found is None or entry is None:
        return "expected KL divergence: not measured; kvant eval measures it"
    return (
        f"expected KL divergence: {entry['kld_mean']:.2g} nats, measured on {found['model']} in windows of "
        f"{entry['context']} tokens"
    )


def _is_calibrated_fp8(kv: KVPlan) -> bool:
    """Whether scales of the checkpoint are used; the measurements had none."""
    return any(
        choice is not None
        and choice.scale.state is ScaleState.FOUND
        and not choice.dtype.format.takes_rounding
        for layer in kv.layers
        for choice in (layer.k, layer.v)
    )
