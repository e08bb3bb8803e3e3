"""The table of acceptance cases at the end of a run, and the audit of engines at the end of a test."""

from __future__ import annotations

pytest_plugins = ["tests.acceptance.report", "tests.audit"]
