"""Weights on disk: palm_ds's own folders, other formats, conversion and downloads."""
