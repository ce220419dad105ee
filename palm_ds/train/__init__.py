"""A training run: recipe, set-up, loop, evaluation, export."""
