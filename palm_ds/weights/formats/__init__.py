"""Checkpoints of others, read and written: one file a format (contents.py says what they share)."""
