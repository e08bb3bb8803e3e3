"""Plumbing that kernels of all rooms share."""
