"""OpenAI's Responses API: its bodies, its answers, and the conversion of a body to a `Generation`."""
