"""Conversion between checkpoint formats, and the proof that both sides compute the same."""
