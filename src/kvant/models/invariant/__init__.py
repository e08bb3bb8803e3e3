"""Batch-invariant computation: each row's bits do not depend on the rows beside it."""
