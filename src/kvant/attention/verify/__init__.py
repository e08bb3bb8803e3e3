"""Verification: compare a backend's writer and reader with the format's definition in float64."""
