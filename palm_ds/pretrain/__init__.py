"""Pretraining tasks, one file each; the file name is the task's kind in a recipe."""
