"""Kvant's own decoder for plain dense models: the same weights, fewer operations per step."""
