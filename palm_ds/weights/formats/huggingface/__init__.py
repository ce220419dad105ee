"""Hugging Face checkpoints."""
