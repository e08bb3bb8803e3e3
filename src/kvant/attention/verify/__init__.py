"""Proof by numbers: a backend's writer and reader against the definition of the format, in float64."""
