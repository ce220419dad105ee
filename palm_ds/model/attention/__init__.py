"""Attention over packed rows: its interface, its implementations, and their choice."""
