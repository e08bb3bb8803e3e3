"""Where the costs of a format on one layer and side come from. No torch."""

from __future__ import annotations

from enum import Enum


class Costs(Enum):
    """MEASURED: a reading for each. GRADIENTS: estimates from backward passes (`gradients.py`)."""

    MEASURED = "measured"
    GRADIENTS = "gradients"
