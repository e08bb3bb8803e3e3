"""The shape of a model from its config.json, without torch or transformers."""

from __future__ import annotations

from kvant.models.geometry.draft import DraftFacts, read_draft_geometry
from kvant.models.geometry.read import read_geometry

__all__ = ["DraftFacts", "read_draft_geometry", "read_geometry"]
