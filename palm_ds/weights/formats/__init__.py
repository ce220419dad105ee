"""Checkpoint formats, one module or folder each; contents.py is what they all open to."""
