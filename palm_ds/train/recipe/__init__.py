"""The recipe: its sections, checks, learning rate schedule and metrics."""
