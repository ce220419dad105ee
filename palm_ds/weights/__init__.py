"""Weights on disk: our own folder, other formats, conversion between them, downloads."""
