"""Layers that carry a state from token to token: their mixers over packed sequences."""
