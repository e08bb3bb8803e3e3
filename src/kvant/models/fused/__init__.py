"""Kvant's own decoder: runs the weights of transformers models with fewer operations per step."""
