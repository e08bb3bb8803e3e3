"""What a checkpoint says about its KV cache: wishes, scales, and where they are written."""
