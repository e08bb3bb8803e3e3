"""Measurements of quality and speed."""
