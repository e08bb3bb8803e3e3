"""Anthropic's Messages: bodies, answers, and the conversion to a request of the one model."""
