"""`kvant tune`: formats per layer and side under a budget of bytes or of KL divergence."""
