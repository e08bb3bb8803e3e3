"""The shape of a model from its config.json, without torch or transformers."""

from __future__ import annotations

from kvant.models.geometry.draft import DraftFacts, read_draft_geometry
from kvant.models.geometry.read import read_geometry
from kvant.models.geometry.rope import MovingRotary, fix_rotary

__all__ = ["DraftFacts", "MovingRotary", "fix_rotary", "read_draft_geometry", "read_geometry"]
