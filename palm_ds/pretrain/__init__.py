"""Pretraining tasks, one file each; the file's name is the task's kind in a recipe."""
