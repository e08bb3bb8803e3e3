"""Attention over pages of any format on a GPU, in Triton: one kernel family with the format as parameter."""
