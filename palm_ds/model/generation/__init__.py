"""Search for the next tokens, and the decoder with its KV cache."""
