"""Encoders, the states they compute, and what they cost."""
