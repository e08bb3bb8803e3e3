"""Batch-invariant computation: each row's result is, bit for bit, its own, whatever rows are beside it."""
