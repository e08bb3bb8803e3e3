"""OpenAI's Responses: bodies, answers, the store, and the conversion to a request of the one model."""
