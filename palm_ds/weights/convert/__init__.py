"""Converts between checkpoint formats and verifies that both sides give the same outputs."""
