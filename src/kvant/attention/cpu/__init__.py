"""Attention on a CPU: numba kernels that write every format and decode it inside the loop."""
