"""The table of acceptance cases at the end of a run."""

from __future__ import annotations

pytest_plugins = ["tests.acceptance.report"]
