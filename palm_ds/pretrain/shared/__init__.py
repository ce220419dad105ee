"""What several pretraining tasks share. Modules of this folder are no tasks."""
