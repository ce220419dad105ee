"""Seeded mutations of everything that is read from others: checkpoints, tokenizers, tables,
recipes, DeepSpeed files, predictions."""
