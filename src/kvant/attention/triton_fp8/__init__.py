"""Triton's backend, with Hopper's fp8 tensor cores for long prompts over fp8 pages."""
