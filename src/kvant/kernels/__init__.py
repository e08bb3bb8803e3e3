"""Infrastructure that kernels of several packages share."""
