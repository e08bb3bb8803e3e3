"""Products of few rows with narrow weights in CUDA C++."""
