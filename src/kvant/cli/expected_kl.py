"""The measured loss of quality of formats on some models, for `kvant plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.kv.spec import KVPlan, ScaleState, WideRows
from kvant.kv.transfer.measured import conversion_kl
from kvant.models.fused.recipes import recipe_of
from kvant.models.geometry.parameters import QKNorm
from kvant.plan.plan import Plan

_MEASURED = Path(__file__).with_name("measured_kl.json")
"""Measurements by the geometry's fingerprint: mean KL divergence from the model's own dtype, in nats, and
the share of equal most likely tokens. `formats`: by format. `wide`: the same, for numbers of wide rows.
"""

_WITHOUT_NORM = "36788259ad2578e9"
"""Fingerprint of a measured model without norms of queries and keys. It stands for others without them."""

_FOUR_BITS = str(KVDtype.INT4_PER_TOKEN_HEAD)
_FEW_BITS = 4


def expected_kl(kv: KVPlan, geometry: ModelGeometry) -> str | None:
    """Returns a line about the plan's KL divergence; None if every layer stores the model dtype."""
    wide = kv.compute_dtype.kv_dtype
    if list(kv.formats) in ([], [str(wide)]):
        return None
    found = _measured().get(geometry.fingerprint)
    entry, rows = None, ""
    if found is not None and len(kv.formats) == 1 and not _is_calibrated_fp8(kv):
        (name,) = kv.formats
        if not kv.has_wide_rows:
            entry = found["formats"].get(name)
        else:
            entry = _nearest(found["wide"].get(name, ()), kv)
    if found is None or entry is None:
        return "expected KL divergence: not measured; kvant eval measures it"
    if "recent" in entry:
        rows = f" with the first {entry['sink']} and the last {entry['recent']} rows wide"
    return (
        f"expected KL divergence: {entry['kld_mean']:.2g} nats, measured on {found['model']}{rows} in "
        f"windows of {entry['context']:,} tokens"
    )


def conversions(plan: Plan) -> list[str]:
    """Returns a line about the KL divergence of each format of other engines' pages that is converted."""
    asked, kv = plan.request.transfer, plan.target.kv
    if asked is None:
        return []
    target = ", ".join(kv.formats)
    is_known = len(kv.formats) == 1 and not _is_calibrated_fp8(kv)
    fingerprint = plan.target.geometry.fingerprint if is_known else ""
    sources = sorted(dtype.format.name for dtype in asked.convert)
    return [
        f"pages of {source} become {target}: {conversion_kl(fingerprint, source, target)}"
        for source in sources
        if source != target
    ]


def risk(kv: KVPlan, geometry: ModelGeometry) -> str | None:
    """Returns a warning about keys of few bits in a model without norms of queries and keys, else None.

    Returns None for an unknown family.
    """
    narrow = {
        layer.k.dtype
        for layer in kv.layers
        if layer.k is not None
        and layer.wide is None
        and layer.geometry.attention is not Attention.MLA
        and layer.k.dtype.format.bits <= _FEW_BITS
    }
    recipe = recipe_of(geometry.model_type)
    if not narrow or recipe is None or recipe.attention.qk_norm is not QKNorm.NONE:
        return None
    one = _measured()[_WITHOUT_NORM]
    worst = min(narrow, key=lambda dtype: (dtype.format.bits, str(dtype)))
    entry = next((e for n, e in one["formats"].items() if n.split("/")[0] == str(worst)), None)
    if entry is None:
        entry = one["formats"][_FOUR_BITS]
    best = one["wide"][_FOUR_BITS][0]
    return (
        f"keys of {worst.format.bits} bits without norms of queries and keys: {one['model']} has none "
        f"either, and {entry['same_top']:.0%} of its most likely tokens stayed the same; with 4 bits and "
        f"--kv-recent-tokens {best['recent']}, {best['same_top']:.0%} did"
    )


def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_MEASURED.read_text(encoding="utf-8"))
    return found


def _nearest(measured: list[dict[str, Any]], kv: KVPlan) -> dict[str, Any] | None:
    """Returns the measurement with the most wide rows within the plan's, at the longest context, or None."""
    stored: set[WideRows | None] = {layer.wide for layer in kv.layers}
    rows = stored.pop()
    if stored or rows is None or len(rows.sides) < len(Side):
        return None
    if not all(choice.dtype.format.is_native for choice in rows.sides.values()):
        return None
    fitting = [e for e in measured if e["sink"] <= rows.sink and e["recent"] <= rows.recent]
    return max(fitting, key=lambda e: (e["recent"], e["sink"], e["context"]), default=None)


def _is_calibrated_fp8(kv: KVPlan) -> bool:
    """Returns whether the plan uses the checkpoint's scales, which the measurements did not."""
    return any(
        choice is not None
        and choice.scale.state is ScaleState.FOUND
        and not choice.dtype.format.takes_rounding
        for layer in kv.layers
        for choice in (layer.k, layer.v)
    )
