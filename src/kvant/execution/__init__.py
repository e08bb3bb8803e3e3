"""Runs one step: builds its inputs, replays its CUDA graph or runs the forward, and reads its results."""
