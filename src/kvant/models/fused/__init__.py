"""A decoder of our own for plain dense models: the same weights, far fewer operations a step."""
