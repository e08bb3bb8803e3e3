"""Global scales of nvfp4 where no checkpoint brings calibrated ones.

Convention: stored * block * global = value. Placeholders until they are measured.
"""

from __future__ import annotations

NVFP4_GLOBAL_K = 1.0
NVFP4_GLOBAL_V = 1.0
