"""KV cache: what every layer stores, who decided it, and how many bytes it takes."""
