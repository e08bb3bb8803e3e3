"""Formats of weights: what they are, what their bytes mean, and the products that read them."""
