"""The interface of a task, and what tasks share: examples, layouts, masking, generation."""
