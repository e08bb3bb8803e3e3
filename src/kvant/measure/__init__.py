"""What a format costs in quality, and how fast things are."""
