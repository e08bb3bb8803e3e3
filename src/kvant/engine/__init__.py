"""The engine: from a request to tokens."""
