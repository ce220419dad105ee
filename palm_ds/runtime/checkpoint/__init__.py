"""Checkpoints: complete or absent, hashed, independent of the number of processes."""
