"""Heads and their losses: classes, tokens, tags, numbers, vectors, texts."""
