"""Sequences, their pages, and the choice of what each step runs."""
