"""Rows for a teacher to label, and teachers' scores of them, as files."""
