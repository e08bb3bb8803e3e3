"""The heart: what is stored for every layer, who decided it, and how many bytes it takes."""
