"""Triton kernels: device facts and shared launches."""
