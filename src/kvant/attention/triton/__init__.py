"""Attention over pages of any format on a GPU, in Triton: one kernel family, the format a parameter."""
