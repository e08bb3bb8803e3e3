"""Tiers of memory behind the pages that a device holds: host memory, then files."""
