"""`kvant calibrate`: scales and rounding matrices of the KV cache, measured on text."""
