"""Code shared by fine-tuning tasks. Modules in this folder do not define tasks."""
