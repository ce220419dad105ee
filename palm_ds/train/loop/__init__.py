"""The training loop, and what watches over it."""
