"""What a request asks of its logits, and how a token is chosen from them."""
