"""The recipes are scripts, not a package: put their folder on the path as running one does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
