"""Losses of a student: soft labels, hidden states, relations, the vocabulary."""
