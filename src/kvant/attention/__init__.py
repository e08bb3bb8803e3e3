"""Attention over stored pages: step metadata, backends, their selection, and the transformers hook."""
