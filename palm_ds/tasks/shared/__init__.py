"""What several fine-tuning tasks share. Modules of this folder are no tasks."""
