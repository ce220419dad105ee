"""DeepSpeed's import and its configuration file."""
