"""Products of narrow weights in Triton."""
