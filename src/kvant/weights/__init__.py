"""Formats of weights: their declarations, the meaning of their bytes, and the products that read them."""
