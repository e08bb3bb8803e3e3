"""One step: its inputs, its graphs, its results."""
