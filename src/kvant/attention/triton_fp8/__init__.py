"""Triton's backend, but for long stretches of queries over fp8 pages: Hopper's fp8 tensor cores."""
