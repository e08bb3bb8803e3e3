"""The measured loss of quality of converted pages, for the plan and for the log of the handshake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).with_name("conversions.json")
"""Measurements by the geometry's fingerprint. `kld_mean`: mean KL divergence from the model's own dtype, in
nats, by the format of the pages and the format that they are converted to; equal names: without a conversion.
"""


def conversion_kl(fingerprint: str, source: str, target: str) -> str:
    """Says what storing in either format loses, and what the conversion does.

    fingerprint: of the geometry. source, target: names of formats of all layers, K and V, without scales of
    a calibration.
    """
    found: dict[str, Any] | None = json.loads(MEASURED.read_text("utf-8")).get(fingerprint)
    kl = {} if found is None else found["kld_mean"]
    if found is None or source == target or target not in kl.get(source, {}):
        return "KL divergence: not measured"
    return (
        f"KL divergence of {source}: {kl[source][source]:.2g} nats, of {target}: {kl[target][target]:.2g}, "
        f"of the conversion: {kl[source][target]:.2g}, measured on {found['model']} in windows of "
        f"{found['context']:,} tokens"
    )
