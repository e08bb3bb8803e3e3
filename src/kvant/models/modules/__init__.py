"""transformers' own modules as a forward."""
