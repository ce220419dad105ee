"""Teachers of a run: which task each supervises, how they are built, stored scores."""
